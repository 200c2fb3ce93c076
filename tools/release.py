"""Makes a release: checks the tree, builds and tries the packages, and creates the tag.

    tools/release --dry-run     # everything but the tag
    tools/release

Before you run it, set the version in shmllm/version.py, give CHANGELOG.md a section for it, and
commit both on main. The tool builds an sdist and a wheel from the committed files, installs each in
a fresh virtual environment and runs `shmllm` there in an empty directory. Then it creates the
annotated tag v<version>. It pushes and uploads nothing. The packages and the log are in dist/.

The tool needs Python 3.11 to 3.13, git, and a network for pip. It takes several minutes and several
GiB in the temporary directory, because it installs torch twice.
"""

from __future__ import annotations

import argparse
import configparser
import datetime
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

REPOSITORY = Path(__file__).resolve().parent.parent
BRANCH = "main"
PYTHONS = ((3, 11), (3, 13))
PROMPT = "def add(a, b):"
# These would make the fresh environments use files of this one.
HIDDEN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class ReleaseError(Exception):
    """A reason not to release, as one line of text."""


def check_tree(repository: Path) -> str:
    """Checks that the repository is ready for a release.

    Returns:
        The version to release.

    Raises:
        ReleaseError: it is not ready; the message says what to do.
    """
    version = read_version(repository / "shmllm" / "version.py")
    branch = git(repository, "rev-parse", "--abbrev-ref", "HEAD")
    if branch != BRANCH:
        raise ReleaseError(f"the branch is {branch!r}; releases are made on {BRANCH!r}")
    if changes := git(repository, "status", "--porcelain").splitlines():
        raise ReleaseError(
            f"{len(changes)} files are not committed, such as {changes[0][3:]}; commit or remove "
            "them"
        )
    check_changelog((repository / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if git(repository, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists; set a new version in shmllm/version.py")
    return version


def read_version(path: Path) -> str:
    """Reads the version from the text of shmllm/version.py.

    Raises:
        ReleaseError: it has no version of the form X.Y.Z.
    """
    text = path.read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    if found is None:
        raise ReleaseError(f'{path} has no line like __version__ = "1.2.3"')
    return found[1]


def check_changelog(text: str, version: str) -> None:
    """Checks that the changelog has a section for `version` with a valid date.

    Raises:
        ReleaseError: it does not.
    """
    found = re.search(rf"^## \[{re.escape(version)}\](.*)$", text, re.MULTILINE)
    if found is None:
        raise ReleaseError(
            f"CHANGELOG.md has no section for {version}; insert the line "
            f'"## [{version}] - {datetime.date.today()}" after "## [Unreleased]"'
        )
    try:
        datetime.date.fromisoformat(found[1].removeprefix(" - "))
    except ValueError:
        raise ReleaseError(
            f'CHANGELOG.md has the heading "{found[0]}" without a date; it has to be like '
            f'"## [{version}] - {datetime.date.today()}"'
        ) from None


def git(repository: Path, *arguments: str) -> str:
    """Runs git and returns its output.

    Raises:
        ReleaseError: git is missing or fails.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise ReleaseError("git is not installed") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ReleaseError(f"git {arguments[0]}: {lines[-1]}")
    return done.stdout.rstrip("\n")


class Runner:
    """Runs commands whose output goes to a log.

    Args:
        log: the open log file.
    """

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._environment = {
            name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES
        } | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}

    def run(self, *command: str | Path, cwd: Path) -> str:
        """Runs a command in `cwd` and returns its stdout.

        Raises:
            ReleaseError: the command fails.
        """
        shown = " ".join(str(part) for part in command)
        self._log.write(f"$ {shown}\n")
        self._log.flush()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._log.write(done.stdout)
        if done.returncode:
            raise ReleaseError(f"exit code {done.returncode} of: {shown}; see {self._log.name}")
        return done.stdout

    def make_environment(self, directory: Path, *packages: str | Path) -> Path:
        """Makes a virtual environment with packages; returns its directory of programs."""
        self.run(sys.executable, "-m", "venv", directory, cwd=directory.parent)
        programs = directory / "bin"
        self.run(programs / "python", "-m", "pip", "install", *packages, cwd=directory)
        return programs


def export(repository: Path, directory: Path) -> None:
    """Copies the committed files to `directory`.

    setuptools would also pack files that an earlier build left in the repository.
    """
    archive = directory.with_suffix(".tar")
    git(repository, "archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")


def build(runner: Runner, source: Path, target: Path, work: Path) -> list[Path]:
    """Builds the sdist, and the wheel from it.

    Returns:
        The wheel and the sdist in `target`.

    Raises:
        ReleaseError: the build fails.
    """
    programs = runner.make_environment(work / "build-environment", "build")
    runner.run(programs / "python", "-m", "build", "--outdir", target, source, cwd=work)
    return [*target.glob("*.whl"), *target.glob("*.tar.gz")]


def torch_requirement(source: Path) -> str:
    """The requirement for torch in setup.cfg.

    Some package indexes offer other builds of torch only if it is named on the command line.
    """
    parser = configparser.ConfigParser()
    parser.read(source / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["install_requires"].split()
    return next(line for line in lines if re.match(r"torch\b", line))


def try_package(runner: Runner, package: Path, torch: str, version: str, work: Path) -> None:
    """Installs a package in a fresh virtual environment and runs `shmllm` in an empty directory.

    Raises:
        ReleaseError: the package cannot be installed, or `shmllm` fails.
    """
    environment, empty = work / "environment", work / "empty"
    empty.mkdir()
    try:
        programs = runner.make_environment(environment, torch, package)
        shown = runner.run(programs / "shmllm", "--version", cwd=empty).strip()
        if shown != f"shmllm, version {version}":
            raise ReleaseError(f"{package.name}: shmllm --version prints {shown!r}")
        command = (programs / "shmllm", "generate", PROMPT, "--max-tokens", "4")
        if not runner.run(*command, cwd=empty).strip():
            raise ReleaseError(f"{package.name}: shmllm generate prints no text")
        if files := [path.name for path in empty.iterdir()]:
            raise ReleaseError(f"{package.name}: shmllm generate leaves files: {files}")
    finally:
        shutil.rmtree(environment, ignore_errors=True)
        shutil.rmtree(empty)


def release(repository: Path, is_dry_run: bool) -> None:
    """Runs all steps of a release.

    Raises:
        ReleaseError: a step fails; no tag was created.
    """
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise ReleaseError(f"Python {sys.version_info[0]}.{sys.version_info[1]} is not supported")
    version = check_tree(repository)
    target = repository / "dist"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="shmllm-release-") as directory,
        open(target / "release.log", "w", encoding="utf-8") as log,
    ):
        work, runner = Path(directory), Runner(log)
        source = work / "source"
        print(f"building shmllm {version}", flush=True)
        export(repository, source)
        packages = build(runner, source, target, work)
        for package in packages:
            print(f"trying {package.name}", flush=True)
            try_package(runner, package, torch_requirement(source), version, work)
    if is_dry_run:
        print(f"dist/ holds shmllm {version}; --dry-run: no tag was created")
        return
    git(repository, "tag", "--annotate", f"v{version}", "--message", f"shmllm {version}")
    print(f"created the tag v{version}; publish it with: git push origin {BRANCH} v{version}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="tools/release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="do everything but create the tag")
    options = parser.parse_args(arguments)
    try:
        release(REPOSITORY, options.dry_run)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
