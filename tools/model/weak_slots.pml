/*
 * One tensor slot on a machine that reorders.   shmllm/ipc/slots.py, ring.py, words.py
 *
 * The same as slots.pml with one slot and without kills. The reference's record is reduced to the
 * published word of its ring.
 *
 * Invariants
 *   I1  A reader that has a reference finds its slot published, with the size and the payload of
 *       that publication (at `check`), until it releases the slot.
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif

#define WRITER 0
#define READER 1

#define PUBLISHED        0
#define SIZE             1
#define PAYLOAD          2
#define RELEASED         3
#define RECORD_PUBLISHED 4
#define WORDS            5

#include "weak.pml"

#ifdef NO_RELEASE_RECORD
#define FENCE_BEFORE_RECORD NO_FENCE
#else
#define FENCE_BEFORE_RECORD FENCE
#endif
#ifdef NO_ACQUIRE_RECORD
#define FENCE_AFTER_LOAD NO_FENCE
#else
#define FENCE_AFTER_LOAD FENCE
#endif
#ifdef NO_RELEASE_RELEASED
#define FENCE_BEFORE_RELEASE NO_FENCE
#else
#define FENCE_BEFORE_RELEASE FENCE
#endif

proctype writer(byte me)
{
	byte published;
	do
	:: published == MESSAGES -> break
	:: published < MESSAGES && LOAD(RELEASED) == published ->
		/* SYNC POINT: slot released. The branch on it comes before the next stores. */
		STORE(PAYLOAD, published + 1);
		STORE(SIZE, published + 1);
		published++;
		/* SYNC POINT: slot published. The ring's fence orders all three stores. */
		STORE(PUBLISHED, published);
		/* SYNC POINT: record published */
		FENCE_BEFORE_RECORD;
		STORE(RECORD_PUBLISHED, published)
	od;
end:	false
}

proctype reader(byte me)
{
	byte released;
	do
	:: released == MESSAGES -> break
	:: released < MESSAGES && LOAD(RECORD_PUBLISHED) > released ->
		/* SYNC POINT: record published */
		FENCE_AFTER_LOAD;
check:		assert(LOAD(PUBLISHED) == released + 1);
		assert(LOAD(SIZE) == released + 1);
		read(PAYLOAD, released + 1);
		released++;
		/* SYNC POINT: slot released */
		FENCE_BEFORE_RELEASE;
		STORE(RELEASED, released)
	od;
end:	false
}

init
{
	atomic {
		run writer(WRITER);
		run reader(READER);
		run_memory(WRITER, READER);
		run_memory(READER, WRITER)
	}
}
