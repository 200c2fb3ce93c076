/*
 * Several engines that wake one front end.   shmllm/ipc/output_waiter.py, CoreChannel.try_send
 *
 * Each of two engines publishes MESSAGES outputs in a ring of its own, which has room for all. Both
 * post the same doorbell, if the front end's one `parked` word says that it waits. The front end
 * takes what it finds in either ring, and parks when both are empty. A park has NO cap. Nobody dies.
 *
 * Invariants
 *   I1  The front end does not sleep for ever while a ring has an output (spin's invalid end states).
 *   I2  It never takes more than an engine has published (at `take`).
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif

#define FRONT     2
#define PROCESSES 3

#define PARKED 2	/* words 0 and 1: PUBLISHED of each engine */
#define WORDS  3

#include "tso.pml"

#ifdef NO_ENGINE_FENCE
#define FENCE_AFTER_PUBLISH NO_FENCE
#else
#define FENCE_AFTER_PUBLISH FENCE
#endif
#ifdef NO_FRONT_FENCE
#define FENCE_IN_PARK NO_FENCE
#else
#define FENCE_IN_PARK FENCE
#endif

byte sent[2];	/* ghost: what each engine has published */

proctype engine(byte me)
{
	byte position, is_parked;
	do
	:: position < MESSAGES ->
		atomic { position++; sent[me] = position };
		/* SYNC POINT: record published */
		STORE(me, position);
		FENCE_AFTER_PUBLISH;
		post_if_parked(PARKED, FRONT)
	:: position == MESSAGES -> break
	od;
end:	false
}

proctype front(byte me)
{
	byte first, second;	/* positions */
	byte new_first, new_second;
	do
	:: first == MESSAGES && second == MESSAGES -> break
	:: else ->
		new_first = LOAD(0);
		new_second = LOAD(1);
		if
		:: new_first != first || new_second != second ->
take:			atomic {
				assert(new_first <= sent[0] && new_second <= sent[1]);
				first = new_first;
				second = new_second
			}
		:: else ->
			STORE(PARKED, 1);
			/* SYNC POINT: parked against published (Waiter._park) */
			FENCE_IN_PARK;
			new_first = LOAD(0);
#ifndef ONE_RING
			new_second = LOAD(1);
#endif
			if
			:: new_first != first || new_second != second
			:: else -> IS_RUNG
			fi;
			leave_park(PARKED)
		fi;
		atomic { new_first = 0; new_second = 0 }
	od;
end:	false
}

init
{
	atomic {
		run engine(0);
		run engine(1);
		run front(FRONT);
		run flusher(0);
		run flusher(1);
		run flusher(FRONT)
	}
}
