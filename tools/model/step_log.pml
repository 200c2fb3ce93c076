/*
 * The step log on a machine that reorders.   shmllm/ipc/step_log.py, words.py
 *
 * A writer logs STEPS records of two words in a circle of PLACES records, and stores the count after
 * each. A reader copies the whole circle at any time between two loads of the count, and
 * takes the records that no later one can have touched. It reads once.
 *
 * Invariant
 *   I1  Each record that the reader takes is the one that was logged there, whole (at `take`).
 */

#ifndef STEPS
#define STEPS 3
#endif
#ifndef PLACES
#define PLACES 2
#endif

#define WRITER 0
#define READER 1

#define COUNT 0
#define FIRST_WORD(step) (1 + 2 * ((step) % PLACES))
#define LAST_WORD(step)  (2 + 2 * ((step) % PLACES))
#define WORDS (1 + 2 * PLACES)

#include "weak.pml"

#ifdef NO_FENCE_BEFORE_STORE
#define FENCE_BEFORE_STORE NO_FENCE
#else
#define FENCE_BEFORE_STORE FENCE
#endif
#ifdef NO_FENCE_AFTER_STORE
#define FENCE_AFTER_STORE NO_FENCE
#else
#define FENCE_AFTER_STORE FENCE
#endif
#ifdef NO_FENCE_AFTER_LOAD
#define FENCE_AFTER_LOAD NO_FENCE
#else
#define FENCE_AFTER_LOAD FENCE
#endif
#ifdef NO_FENCE_BEFORE_LOAD
#define FENCE_BEFORE_LOAD NO_FENCE
#else
#define FENCE_BEFORE_LOAD FENCE
#endif

#ifdef KEEP_OLDEST
#define FIRST_WHOLE (count > PLACES -> count - PLACES : 0)
#else
#define FIRST_WHOLE (count + 1 > PLACES -> count + 1 - PLACES : 0)
#endif

proctype writer(byte me)
{
	byte step;
	do
	:: step == STEPS -> break
	:: step < STEPS ->
		STORE(FIRST_WORD(step), step + 1);
		STORE(LAST_WORD(step), step + 1);
		step++;
		/* SYNC POINT: step logged */
		FENCE_BEFORE_STORE;
		STORE(COUNT, step);
		FENCE_AFTER_STORE
	od;
end:	false
}

proctype reader(byte me)
{
	byte end_of_log, count, step;
	byte copy[WORDS];
	/* SYNC POINT: step logged */
	end_of_log = LOAD(COUNT);
	FENCE_AFTER_LOAD;
	step = 1;
	do
	:: step < WORDS -> copy[step] = LOAD(step); step++
	:: else -> break
	od;
	FENCE_BEFORE_LOAD;
	count = LOAD(COUNT);
	step = FIRST_WHOLE;
	do
	:: step < end_of_log ->
take:		assert(copy[FIRST_WORD(step)] == step + 1 && copy[LAST_WORD(step)] == step + 1);
		step++
	:: else -> break
	od;
end:	false
}

init
{
	atomic {
		run writer(WRITER);
		run reader(READER);
		run_memory(WRITER, READER)
	}
}
