/*
 * How a front end takes a place of a named engine, and how it loses it.
 * shmllm/engine/client_acceptor.py, shmllm/client/attached.py
 *
 * One place. A front end links its segment under the place's name, writes its nonce into the hello
 * word and waits for the answer word: a nonce and a code. Two front ends do that at any time, each
 * once; the second takes the place after the first has left or died. They may be killed at any
 * point. A faulty process writes numbers into the hello word, which every front end maps writable:
 * a number that is no nonce, and any nonce that it can have read in a linked segment.
 *
 * The words are atomic here; the rings' models have the fences and the doorbell. ownership.pml
 * models how a name is linked and removed.
 *
 * Invariants
 *   I1  The engine ends no session whose front end is alive and neither leaves nor is too slow
 *       (in `dismiss`).
 *   I2  The engine refuses no front end that follows the protocol, and none takes the refusal of
 *       another one for its own (at `refused`).
 *   I3  An accepted front end that believes that its session has ended is right (at `lost`), and
 *       one whose session has ended learns it: none is accepted a second time (at `accept`).
 *   I4  A front end that the engine does not serve does not wait for ever (spin's invalid end
 *       states).
 */

#ifndef LIES
#define LIES 2
#endif

/* The code before answers had nonces. */
#ifdef WITHOUT_NONCES
#define REFUSAL_WITHOUT_NONCE
#define DISMISS_FIRST
#define SERVE_AGAIN
#define SAY_ONCE
#endif

#define NOBODY 0
#define FIRST  1
#define SECOND 2
#define NO_NONCE 3

#define NONE     0
#define ACCEPTED 1
#define REFUSED  2
#define ENDED    3

byte link;		/* the front end whose segment has the place's name */
byte hello;
byte answer_nonce, answer_code;
bool is_owned[4];	/* the segment's lock: the front end is alive */
bool is_closing[4];	/* the word CLIENT_STATE of its segment */
bool is_ready[4];	/* READY lies in its output ring */
byte session;		/* the engine's live session */

bool killed[4];
bool was_linked[4];	/* ghosts */
bool was_served[4];
bool was_slow[4];

#define HAS_LEFT(who) (!is_owned[who] || is_closing[who])
#define ANSWER(who, code) answer_nonce = who; answer_code = code

#ifdef REFUSAL_WITHOUT_NONCE
#define REFUSE(who) ANSWER(NOBODY, REFUSED)
#define IS_REFUSED(me) (answer_code == REFUSED)
#else
#define REFUSE(who) ANSWER(who, REFUSED)
#define IS_REFUSED(me) (answer_nonce == me && answer_code == REFUSED)
#endif

/* A front end that was accepted. */
#ifdef ONLY_OWN_ANSWER
#define IS_LOST(me) (answer_nonce == me && answer_code != ACCEPTED)
#else
#define IS_LOST(me) (answer_nonce != me || answer_code != ACCEPTED)
#endif

#ifdef SAY_ONCE
#define SAY_AGAIN false
#else
#define SAY_AGAIN (hello != me)
#endif

#ifdef REFUSAL_WITHOUT_NONCE
#define DISMISSAL ANSWER(NOBODY, ENDED)
#else
#define DISMISSAL ANSWER(session, ENDED)
#endif
#ifdef SERVE_AGAIN
#define IS_NEW(who) true
#else
#define IS_NEW(who) (who != served)
#endif
#ifdef OVERWRITE_ANSWER
#define MAY_REFUSE true
#else
#define MAY_REFUSE (session == NOBODY)
#endif

proctype front_end(byte me)
{
	{
		/* registry.claim_place links the name; a sweeper removes a dead one's before that */
		if
		:: goto end
		:: atomic { link == NOBODY || !is_owned[link] ->
			is_owned[me] = true;
			was_linked[me] = true;
			link = me }
		fi;
		/* SYNC POINT: client hello */
		hello = me;
		do
		:: atomic { SAY_AGAIN && !is_ready[me] -> hello = me }
		:: IS_REFUSED(me) && !is_ready[me] ->
refused:		assert(false)
		:: is_ready[me] -> break
		od;
		/* SYNC POINT: client accepted */
		if
		:: true	/* leaves by itself */
		:: true ->	/* stays until its session ends, or nothing else happens */
			if
			:: IS_LOST(me) ->
lost:				assert(session != me)
			:: timeout && session == me
			fi
		fi;
		is_closing[me] = true;
		/* registry.withdraw */
		atomic { if :: link == me -> link = NOBODY :: else fi };
		is_owned[me] = false;
end:		false
	} unless { atomic { killed[me] -> is_owned[me] = false } }
}

/* ClientAcceptor.dismiss */
inline dismiss()
{
	atomic {
		assert(HAS_LEFT(session) || was_slow[session]);
		DISMISSAL;
		session = NOBODY
	};
	/* registry.sweep */
	atomic { if :: link != NOBODY && !is_owned[link] -> link = NOBODY :: else fi }
}

proctype engine()
{
	byte last, said, found, served;
end:	do
	:: hello != last ->
		atomic { said = hello; last = said };
#ifdef DISMISS_FIRST
		if
		:: session != NOBODY -> dismiss()
		:: else
		fi;
#endif
		found = link;
		if
		:: found != NOBODY && is_owned[found] && found == said && IS_NEW(found) ->
accept:			assert(!was_served[found]);
			if
			:: session != NOBODY -> dismiss()	/* its name leads to another segment */
			:: else
			fi;
#ifdef READY_FIRST
			is_ready[found] = true;
#endif
			atomic {
				session = found;
				served = found;
				was_served[found] = true;
				/* SYNC POINT: client accepted */
				ANSWER(found, ACCEPTED)
			};
			is_ready[found] = true
		:: atomic { !(found != NOBODY && is_owned[found] && found == said && IS_NEW(found)) ->
			if
			:: MAY_REFUSE -> REFUSE(said)
			:: else
			fi }
		fi;
		atomic { said = 0; found = 0 }
	:: atomic { session != NOBODY && HAS_LEFT(session) -> skip }; dismiss()
	:: atomic { session != NOBODY && !was_slow[session] -> was_slow[session] = true }; dismiss()
	od
}

proctype liar()
{
	byte lies;
end:	do
	:: atomic { lies < LIES -> lies++; hello = NO_NONCE }
	:: atomic { lies < LIES && was_linked[FIRST] -> lies++; hello = FIRST }
	:: atomic { lies < LIES && was_linked[SECOND] -> lies++; hello = SECOND }
	od
}

proctype killer()
{
	if
	:: killed[FIRST] = true
	:: skip
	fi;
	if
	:: killed[SECOND] = true
	:: skip
	fi
}

init
{
	atomic {
		run front_end(FIRST);
		run front_end(SECOND);
		run engine();
		run liar();
		run killer()
	}
}
