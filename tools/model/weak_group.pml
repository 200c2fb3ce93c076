/*
 * Two ranks of a group on a machine that reorders: steps, sums, a gather, parking.
 * shmllm/parallel/memory.py, kernels/shmllm_kernels/cpu/group.py and atomics.py, ipc/words.py
 *
 * The same as group.pml with two ranks, without death. A park has NO cap. Only the fences are
 * modelled without which spin finds a failure. The compiled kernels have no full fences: RELEASE is
 * what orders a store-release behind earlier accesses, ACQUIRE what orders a load-acquire before
 * later ones, and neither orders an earlier store with a later load.
 *
 * Invariants
 *   I1  Each part that a rank adds, and each result that rank 0 gathers, is that of this meeting in
 *       this step (at `read`).
 *   I2  A rank reads the inputs of the step that it computes, until its last thread has left it.
 *   I3  No process sleeps or waits for ever (spin's invalid end states).
 */

#ifndef STEPS
#define STEPS 3
#endif
#ifndef SUMS
#define SUMS 3
#endif
#define GATHER SUMS

/* What rank 0 stores, and then what rank 1 stores. */
#define STEP         0
#define INPUTS       1
#define OF_RANK_0    2
#define OF_RANK_1    (OF_RANK_0 + SUMS + 2)
#define PART(sum)    ((sum) % 2)
#define WORD(sum)    (2 + (sum))
#define PARKED       (OF_RANK_1 + SUMS + 3)
#define LEFT         (PARKED + 1)
#define OUT          (PARKED + 2)
#define WORDS        (PARKED + 3)

#include "weak.pml"

#define RELEASE atomic { num_buffered[me] == 0 && !is_late[me] -> skip }
#define ACQUIRE d_step { \
	each = 0; \
	do \
	:: each < WORDS -> seen[me * WORDS + each] = mem[each]; each++ \
	:: each >= WORDS -> break \
	od; \
	each = 0 }

#ifdef NO_RELEASE_WORD
#define RELEASE_WORD NO_FENCE
#elif defined(STORES_ONLY)
#define RELEASE_WORD num_buffered[me] == 0
#else
#define RELEASE_WORD RELEASE
#endif
#ifdef NO_ACQUIRE_WORD
#define ACQUIRE_WORD NO_FENCE
#else
#define ACQUIRE_WORD ACQUIRE
#endif
#ifdef NO_RELEASE_STEP
#define FENCE_BEFORE_STEP NO_FENCE
#else
#define FENCE_BEFORE_STEP FENCE
#endif
#ifdef NO_ACQUIRE_STEP
#define FENCE_AFTER_LOAD NO_FENCE
#else
#define FENCE_AFTER_LOAD FENCE
#endif
#ifdef NO_RELEASE_LEFT
#define FENCE_BEFORE_LEFT NO_FENCE
#else
#define FENCE_BEFORE_LEFT FENCE
#endif
#ifdef NO_WAKE_FENCE
#define FENCE_AFTER_STEP NO_FENCE
#else
#define FENCE_AFTER_STEP FENCE
#endif
#ifdef NO_PARK_FENCE
#define FENCE_IN_PARK NO_FENCE
#else
#define FENCE_IN_PARK FENCE
#endif

#define VALUE(sum) (step * 16 + (sum))

/* _arrive */
inline arrive(place, word)
{
	STORE(place, VALUE(sum));
	/* SYNC POINT: part published */
	RELEASE_WORD;
	STORE(word, step)
}

/* _await_others, and then what the other rank has written */
inline add(place, word)
{
	LOAD(word) >= step;
	/* SYNC POINT: part published */
	ACQUIRE_WORD;
	read(place, VALUE(sum))
}

inline sum_parts(own, other)
{
	arrive(own + PART(sum), own + WORD(sum));
	add(other + PART(sum), other + WORD(sum))
}

proctype rank_0(byte me)
{
	byte step, sum;
	bit is_parked;
	do
	:: step == STEPS -> break
	:: step < STEPS && LOAD(LEFT) == step ->
		/* SYNC POINT: step left. The branch on it comes before the next stores. */
		step++;
		STORE(INPUTS, step);
		/* SYNC POINT: step begun */
		FENCE_BEFORE_STEP;
		STORE(STEP, step);
		/* SYNC POINT: parked against published */
		FENCE_AFTER_STEP;
		post_if_parked(PARKED, 1);
		do
		:: sum < SUMS -> sum_parts(OF_RANK_0, OF_RANK_1); sum++
		:: else -> break
		od;
		add(OUT, OF_RANK_1 + WORD(GATHER));
		sum = 0
	od;
end:	false
}

proctype rank_1(byte me)
{
	byte step, sum;
	do
	:: step == STEPS -> break
	:: step < STEPS && LOAD(STEP) != step ->
		/* SYNC POINT: step begun */
		FENCE_AFTER_LOAD;
		step++;
		read(INPUTS, step);
		do
		:: sum < SUMS -> sum_parts(OF_RANK_1, OF_RANK_0); sum++
		:: else -> break
		od;
		arrive(OUT, OF_RANK_1 + WORD(GATHER));
		sum = 0;
		/* A thread that comes late counts the pieces of kernels that others have done. */
		read(INPUTS, step);
		/* SYNC POINT: step left */
		FENCE_BEFORE_LEFT;
		STORE(LEFT, step)
	:: step < STEPS && LOAD(STEP) == step ->
		STORE(PARKED, 1);
		FENCE_IN_PARK;
		if
		:: LOAD(STEP) != step
		:: LOAD(STEP) == step -> IS_RUNG
		fi;
		leave_park(PARKED)
	od;
end:	false
}

init
{
	atomic {
		run rank_0(0);
		run rank_1(1);
		for (each : 0 .. OF_RANK_1 - 1) {
			run flusher(0, each);
			run prefetcher(1, each)
		};
		for (each : OF_RANK_1 .. WORDS - 1) {
			run flusher(1, each);
			run prefetcher(0, each)
		};
		run flusher(0, BELL(1));
		run flusher(1, BELL(1));
		run late_loader(0);
		run late_loader(1);
		each = 0
	}
}
