"""How models that read messages are asked for transcripts, by the names of their architectures.

Questions and replies are those of transformers' processors (`apply_transcription_request`), as far
as they have some.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmllm.errors import RequestError


class Timed(NamedTuple):
    """A part of a reply that says when it is said.

    Attributes:
        begin, end: in seconds from the beginning of the window.
        words: what is said.
    """

    begin: float
    end: float
    words: str


Reply = tuple[str, str]
"""The code of a language, empty if the reply names none, and what is said."""


def _whole(text: str, names: Mapping[str, str]) -> Reply:
    return "", text.strip()


def _behind_language(text: str, names: Mapping[str, str]) -> Reply:
    """Reads "language English<asr_text>Words."; without the mark the reply has no language."""
    begin, mark, words = text.rpartition("<asr_text>")
    if not mark:
        return _whole(text, names)
    name = begin.strip().removeprefix("language").strip()
    codes = {name: code for code, name in names.items()}
    return codes.get(name, ""), words.strip()


_FRAMES = (
    "The spoken content of the audio is",
    "The transcription of the audio is",
    "The content of the input audio is",
)


def _without_frame(text: str, names: Mapping[str, str]) -> Reply:
    """Reads "The spoken content of the audio is 'Words.'."; other replies are all words."""
    words = text.strip()
    frame = next((frame for frame in _FRAMES if words.startswith(frame)), None)
    if frame is None:
        return "", words
    words = words.removeprefix(frame).strip().removesuffix(".").strip()
    is_quoted = len(words) > 1 and words[0] == words[-1] and words[0] in "'\""
    return "", words[1:-1].strip() if is_quoted else words


_TIMED = re.compile(r"\[([^\[\]]+)\]\[S\d+\](.*?)\[([^\[\]]+)\]", re.DOTALL)


def _timed(text: str) -> list[Timed]:
    """Reads "[0.00][S01]Hello there.[7.56]", times also as minutes and seconds, without the numbers
    of speakers. What has no such form is left out."""
    found = []
    for begin, words, end in _TIMED.findall(text):
        first, last = _seconds_of(begin), _seconds_of(end)
        if first is not None and last is not None and words.strip():
            found.append(Timed(first, last, words.strip()))
    return found


def _seconds_of(text: str) -> float | None:
    """The seconds of "1:02:03.4"; None: it is no time."""
    parts = text.strip().split(":")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        return None
    seconds = sum(value * 60**place for place, value in enumerate(reversed(values)))
    return seconds if 0 <= seconds < math.inf else None


@dataclass(frozen=True, kw_only=True)
class Question:
    """
    Attributes:
        text: what a message says beside its sound; empty: nothing.
        is_first: whether the text stands before the sound.
        languages: what the model calls languages, by their codes.
        begin: what a reply begins with that names a language, which takes the place of "{0}", that
            of the reply the place of "{1}"; without a message, tokens with spaces between them.
        unknown: what takes the place of a language that is not told; empty: a reply begins with
            nothing then.
        read: makes a Reply of what the model writes, and of `languages`.
        is_message: whether the sound is in a message; otherwise a decoder attends to it, or it is
            part of `begin`, and the model writes what follows that.
        needs_language: whether the model has to be told the language.
        translates: whether it translates into English.
        template: variables for the chat template.
        read_times: finds parts with times in what the model writes; None: there are none.
    """

    text: str = ""
    is_first: bool = False
    languages: Mapping[str, str] = field(default_factory=dict)
    begin: str = ""
    unknown: str = ""
    read: Callable[[str, Mapping[str, str]], Reply] = _whole
    is_message: bool = True
    needs_language: bool = False
    translates: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    read_times: Callable[[str], list[Timed]] | None = None

    def check(self, language: str | None, task: str) -> None:
        """Raises RequestError if the model cannot be asked for a language, or for a task."""
        if task != "transcribe" and not self.translates:
            raise RequestError("the model translates nothing", parameter="task")
        if language in self.languages or (language is None and not self.needs_language):
            return
        if language is None:
            raise RequestError(
                "the model has to be told the language, one of "
                f"{' '.join(sorted(self.languages))}: pass language=, or --language",
                parameter="language",
            )
        if not self.languages:
            raise RequestError(
                "the model cannot be told a language: it finds out by itself", parameter="language"
            )
        raise RequestError(
            f"the model knows no language {language!r}; its languages are "
            f"{' '.join(sorted(self.languages))}",
            parameter="language",
        )

    def message(self, sound: Any) -> list[dict[str, Any]]:
        """The conversation that asks for the transcript of a sound."""
        parts: list[dict[str, Any]] = [{"type": "audio", "audio": sound}]
        if self.text:
            parts.insert(0 if self.is_first else 1, {"type": "text", "text": self.text})
        return [{"role": "user", "content": parts}]

    def begin_of(self, language: str | None, task: str = "transcribe") -> str:
        """What the reply begins with, which the model is given."""
        if language is None and not self.unknown:
            return ""
        name = self.unknown if language is None else self.languages[language]
        return self.begin.format(name, name if task == "transcribe" else self.languages["en"])


_OF_QWEN = {
    **{"ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish"},
    **{"nl": "Dutch", "en": "English", "fil": "Filipino", "fi": "Finnish", "fr": "French"},
    **{"de": "German", "el": "Greek", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian"},
    **{"it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay"},
    **{"fa": "Persian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian"},
    **{"es": "Spanish", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese"},
}

_OF_GRANITE = Question(text="can you transcribe the speech into a written format?")
"""That of its authors' examples: transformers' processor has none."""
_TASK = (
    "<|startofcontext|> <|startoftranscript|> <|emo:undefined|> <|{0}|> <|{1}|> <|pnc|> <|noitn|> "
    "<|notimestamp|> <|nodiarize|>"
)
"""What the decoders of Canary (NeMo's prompt of it) and Cohere Transcribe begin with."""
_OF_COHERE = "ar de el en es fr it ja ko nl pl pt vi zh"
_OF_CANARY = "bg cs da de el en es et fi fr hr hu it lt lv mt nl pl pt ro ru sk sl sv uk"
"""The codes of languages, which are these models' names of them."""
_OF_OMNIASR = (
    "ab:abk_cyrl af:afr_latn ak:aka_latn am:amh_ethi an:arg_latn ar:arb_arab as:asm_beng "
    "av:ava_cyrl ay:ayr_latn az:aze_latn ba:bak_cyrl be:bel_cyrl bg:bul_cyrl bi:bis_latn "
    "bm:bam_latn bn:ben_beng bo:bod_tibt br:bre_latn bs:bos_latn ca:cat_latn ce:che_cyrl "
    "cs:ces_latn cv:chv_cyrl cy:cym_latn da:dan_latn de:deu_latn dv:div_thaa dz:dzo_tibt "
    "ee:ewe_latn el:ell_grek en:eng_latn eo:epo_latn es:spa_latn et:ekk_latn eu:eus_latn "
    "fa:fas_arab ff:ful_latn fi:fin_latn fj:fij_latn fo:fao_latn fr:fra_latn fy:fry_latn "
    "ga:gle_latn gl:glg_latn gn:grn_latn gu:guj_gujr gv:glv_latn ha:hau_latn he:heb_hebr "
    "hi:hin_deva hr:hrv_latn ht:hat_latn hu:hun_latn hy:hye_armn hz:her_latn ia:ina_latn "
    "id:ind_latn ig:ibo_latn ik:ipk_latn is:isl_latn it:ita_latn ja:jpn_jpan jv:jav_latn "
    "ka:kat_geor ki:kik_latn kj:kua_latn kk:kaz_cyrl km:khm_khmr kn:kan_knda ko:kor_hang "
    "kr:knc_latn ks:kas_arab ku:kur_arab kv:kpv_cyrl kw:cor_latn ky:kir_cyrl la:lat_latn "
    "lb:ltz_latn lg:lug_latn ln:lin_latn lo:lao_laoo lt:lit_latn lv:lav_latn mg:mlg_latn "
    "mh:mah_latn mi:mri_latn mk:mkd_cyrl ml:mal_mlym mn:mon_cyrl mr:mar_deva ms:zsm_latn "
    "mt:mlt_latn my:mya_mymr nb:nob_latn ne:nep_deva ng:ndo_latn nl:nld_latn nn:nno_latn "
    "no:nob_latn ny:nya_latn oc:oci_latn om:orm_latn or:ory_orya os:oss_cyrl pa:pan_guru "
    "pl:pol_latn ps:pus_arab pt:por_latn rn:run_latn ro:ron_latn ru:rus_cyrl rw:kin_latn "
    "sc:srd_latn sd:snd_arab sg:sag_latn si:sin_sinh sk:slk_latn sl:slv_latn sm:smo_latn "
    "sn:sna_latn so:som_latn sq:als_latn sr:srp_cyrl su:sun_latn sv:swe_latn sw:swh_latn "
    "ta:tam_taml te:tel_telu tg:tgk_cyrl th:tha_thai ti:tir_ethi tk:tuk_latn tl:tgl_latn "
    "tn:tsn_latn tr:tur_latn ts:tso_latn tt:tat_cyrl tw:twi_latn ug:uig_arab uk:ukr_cyrl "
    "ur:urd_arab uz:uzb_latn vi:vie_latn wo:wol_latn xh:xho_latn yi:ydd_hebr yo:yor_latn "
    "za:zyb_latn zh:cmn_hans zu:zul_latn"
)
"""Languages of Omnilingual ASR by ISO 639-1, and what the model calls them."""
QUESTIONS: dict[str, Question] = {
    "AudioFlamingo3ForConditionalGeneration": Question(
        text="Transcribe the input speech.", is_first=True, read=_without_frame
    ),
    "CanaryForConditionalGeneration": Question(
        languages={code: code for code in _OF_CANARY.split()},
        begin=_TASK,
        is_message=False,
        needs_language=True,
        translates=True,
    ),
    "CohereAsrForConditionalGeneration": Question(
        languages={code: code for code in _OF_COHERE.split()},
        begin=f"▁ {_TASK}",
        is_message=False,
        needs_language=True,
    ),
    "FunAsrNanoForConditionalGeneration": Question(),
    "GlmAsrForConditionalGeneration": Question(text="Please transcribe this audio into text"),
    "GraniteSpeechForConditionalGeneration": _OF_GRANITE,
    "GraniteSpeechPlusForConditionalGeneration": _OF_GRANITE,
    "MoonshineForConditionalGeneration": Question(is_message=False),
    "MossTranscribeDiarizeForConditionalGeneration": Question(read_times=_timed),
    "NemotronHOmniForConditionalGeneration": Question(
        text="Transcribe this audio.", template={"enable_thinking": False}
    ),
    "OmniASRForConditionalGeneration": Question(
        languages=dict(each.split(":") for each in _OF_OMNIASR.split()),
        begin="<extra_id_1> <extra_id_0> <|lang:{0}|> <s>",
        unknown="auto",
        is_message=False,
    ),
    "Qwen3ASRForConditionalGeneration": Question(
        languages=_OF_QWEN, begin="language {0}<asr_text>", read=_behind_language
    ),
}
"""By the names of architectures."""
