/*
 * One ring on a machine that reorders: publish, consume, park, wake.
 * shmllm/ipc/ring.py, wait.py, words.py
 *
 * The same as ring.pml with records of one word, without close and death. A park has NO cap.
 * Only the fences are modelled without which spin finds a failure.
 *
 * Invariants
 *   I1  Each record is read whole and in order, and before it is overwritten (at `take`).
 *   I2  No process sleeps for ever (spin's invalid end states).
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef CAPACITY
#define CAPACITY 1
#endif

#define WRITER 0
#define READER 1

#define PUBLISHED     0
#define CONSUMED      1
#define READER_PARKED 2
#define WRITER_PARKED 3
#define RECORD(position) (4 + (position) % CAPACITY)
#define WORDS (4 + CAPACITY)

#include "weak.pml"

#ifdef NO_RELEASE_PUBLISHED
#define FENCE_BEFORE_PUBLISH NO_FENCE
#else
#define FENCE_BEFORE_PUBLISH FENCE
#endif
#ifdef NO_ACQUIRE_PUBLISHED
#define FENCE_AFTER_LOAD NO_FENCE
#else
#define FENCE_AFTER_LOAD FENCE
#endif
#ifdef NO_RELEASE_CONSUMED
#define FENCE_BEFORE_CONSUME NO_FENCE
#else
#define FENCE_BEFORE_CONSUME FENCE
#endif
#ifdef NO_WRITER_FENCE
#define FENCE_AFTER_PUBLISH NO_FENCE
#else
#define FENCE_AFTER_PUBLISH FENCE
#endif
#ifdef NO_READER_FENCE
#define FENCE_IN_READER_PARK NO_FENCE
#else
#define FENCE_IN_READER_PARK FENCE
#endif
#ifdef NO_CONSUME_FENCE
#define FENCE_AFTER_CONSUME NO_FENCE
#else
#define FENCE_AFTER_CONSUME FENCE
#endif
#ifdef NO_ROOM_PARK_FENCE
#define FENCE_IN_WRITER_PARK NO_FENCE
#else
#define FENCE_IN_WRITER_PARK FENCE
#endif

proctype writer(byte me)
{
	byte position, consumed;
	bit is_parked;
	do
	:: position == MESSAGES -> break
	:: position < MESSAGES && position - consumed < CAPACITY ->
		STORE(RECORD(position), position + 1);
		position++;
		/* SYNC POINT: record published */
		FENCE_BEFORE_PUBLISH;
		STORE(PUBLISHED, position);
		/* SYNC POINT: parked against published */
		FENCE_AFTER_PUBLISH;
		post_if_parked(READER_PARKED, READER)
	:: position < MESSAGES && position - consumed >= CAPACITY ->
		/* SYNC POINT: record consumed. The branch on it comes before the next stores. */
		consumed = LOAD(CONSUMED);
		if
		:: position - consumed < CAPACITY
		:: else ->
			STORE(WRITER_PARKED, 1);
			FENCE_IN_WRITER_PARK;
			consumed = LOAD(CONSUMED);
			if
			:: position - consumed < CAPACITY
			:: else -> IS_RUNG
			fi;
			leave_park(WRITER_PARKED)
		fi
	od;
end:	false
}

proctype reader(byte me)
{
	byte position, published;
	bit is_parked;
	do
	:: position == MESSAGES -> break
	:: position < MESSAGES ->
		/* SYNC POINT: record published */
		published = LOAD(PUBLISHED);
		FENCE_AFTER_LOAD;
		if
		:: published != position ->
			do
			:: position != published ->
take:				read(RECORD(position), position + 1);
				position++
			:: else -> break
			od;
			/* SYNC POINT: record consumed */
			FENCE_BEFORE_CONSUME;
			STORE(CONSUMED, position);
			FENCE_AFTER_CONSUME;
			post_if_parked(WRITER_PARKED, WRITER)
		:: published == position ->
			STORE(READER_PARKED, 1);
			FENCE_IN_READER_PARK;
			published = LOAD(PUBLISHED);
			if
			:: published != position
			:: else -> IS_RUNG
			fi;
			leave_park(READER_PARKED)
		fi;
		published = 0
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
