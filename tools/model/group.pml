/*
 * A group of ranks that compute parts of the same steps: epochs, sums, a gather, parking, death.
 * shmllm/parallel/memory.py, rank.py, ranks.py, shmllm/worker/cpu/group.py and program.py,
 * kernels/shmllm_kernels/cpu/group.py
 *
 * Rank 0 begins STEPS steps. Each has SUMS meetings, in which all ranks get the sum of their parts,
 * and a last one, in which rank 0 gathers what the others have written. A kill may end one rank at
 * any point; rank 0's watcher sees the death of another rank at any later time, and the others see
 * that of rank 0. A park has NO cap: only a post or the end of the group ends it.
 *
 * A rank that leaves a meeting because the group has ended goes on with GARBAGE. The part of a rank
 * that has summed garbage is garbage.
 *
 * Invariants
 *   I1  Each part that a rank adds is the part of that meeting in that step, never an older or a
 *       newer one, unless the group has ended (in `add`). So is what rank 0 gathers (`gather`).
 *   I2  A rank reads the inputs of the step that it computes, until its last thread has left the
 *       step (`inputs`, `straggler`), and misses no step (`begun`).
 *   I3  No process sleeps or waits for ever, also after a death (spin's invalid end states; the
 *       label `end` marks the only valid ones).
 *   I4  Rank 0 uses no result that has garbage in it (`use`).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef STEPS
#define STEPS 3
#endif
#ifndef SUMS
#define SUMS 3
#endif
#define GATHER SUMS
#define PROCESSES RANKS

#define STEP              0
#define INPUTS            1	/* with KIND */
#define ENDED             2
#define PARKED(rank)      (2 + (rank))
#define LEFT(rank)        (1 + RANKS + (rank))
#define OUT(rank)         (2 * RANKS + (rank))
#define WORD(sum, rank)   (3 * RANKS + (sum) * RANKS + (rank))
#define PART_AT(at, rank) (3 * RANKS + (SUMS + 1 + (at)) * RANKS + (rank))
#define WORDS             ((SUMS + 6) * RANKS)

#include "tso.pml"

/* Broken variants, one -D each. */
#ifdef ONE_BUFFER
#define PART(sum, rank) PART_AT(0, rank)
#else
#define PART(sum, rank) PART_AT((sum) % 2, rank)
#endif
#ifdef NO_PARK_FENCE
#define FENCE_IN_PARK NO_FENCE
#else
#define FENCE_IN_PARK FENCE
#endif
#ifdef NO_WAKE_FENCE
#define FENCE_AFTER_STEP NO_FENCE
#else
#define FENCE_AFTER_STEP FENCE
#endif
#ifdef IGNORE_END
#define HAS_ENDED false
#else
#define HAS_ENDED LOAD(ENDED)
#endif
#if defined(FLAGS) || defined(RESET)
#define ARRIVED 1
#define HAS_ARRIVED(sum, rank) (LOAD(WORD(sum, rank)) == 1)
#elif defined(ONE_WORD)
/* One word for all meetings, which counts them. */
#define ARRIVED ((step - 1) * (SUMS + 1) + sum + 1)
#define HAS_ARRIVED(sum, rank) (LOAD(WORD(0, rank)) == ARRIVED)
#else
#define ARRIVED step
#define HAS_ARRIVED(sum, rank) (LOAD(WORD(sum, rank)) >= step)
#endif
#ifdef ONE_WORD
#define OWN_WORD(sum) WORD(0, me)
#else
#define OWN_WORD(sum) WORD(sum, me)
#endif

#define GARBAGE 255
#define VALUE(sum) (is_garbage -> GARBAGE : step * 16 + (sum))

#define IS_HERE(sum, rank) (me == (rank) || HAS_ARRIVED(sum, rank))
#define HAS_LEFT(rank)     (LOAD(LEFT(rank)) == step)
#if RANKS == 2
#define ALL_HERE(sum) (IS_HERE(sum, 0) && IS_HERE(sum, 1))
#define ALL_LEFT      HAS_LEFT(1)
#else
#define ALL_HERE(sum) (IS_HERE(sum, 0) && IS_HERE(sum, 1) && IS_HERE(sum, 2))
#define ALL_LEFT      (HAS_LEFT(1) && HAS_LEFT(2))
#endif

/* _arrive: the part first, then the word. */
inline arrive(place)
{
#ifdef WORD_FIRST
	STORE(OWN_WORD(sum), ARRIVED);
	STORE(place, VALUE(sum))
#else
	STORE(place, VALUE(sum));
	/* SYNC POINT: part published */
	STORE(OWN_WORD(sum), ARRIVED)
#endif
}

/* _await_others */
inline await_others()
{
	if
	:: ALL_HERE(sum)
	:: HAS_ENDED -> is_garbage = true
	fi
}

/* What rank `other` has written. The loads come one after another; each may be late. */
inline add(place)
{
	atomic {
		assert(is_garbage || LOAD(place) == GARBAGE || LOAD(place) == step * 16 + sum);
		is_garbage = is_garbage || LOAD(place) == GARBAGE
	}
}

inline add_parts()
{
	if
	:: me != 0 -> add(PART(sum, 0))
	:: else
	fi;
	if
	:: me != 1 -> add(PART(sum, 1))
	:: else
	fi;
#if RANKS > 2
	if
	:: me != 2 -> add(PART(sum, 2))
	:: else
	fi
#endif
}

inline sum_parts()
{
	arrive(PART(sum, me));
	await_others();
	add_parts();
#ifdef RESET
	STORE(OWN_WORD(sum), 0)
#endif
}

/* GroupMemory.begin */
inline begin()
{
#ifdef STEP_FIRST
	STORE(STEP, step);
	STORE(INPUTS, step);
#else
	STORE(INPUTS, step);
#ifdef POST_FIRST
	FENCE_AFTER_STEP;
	post_all();
#endif
	/* SYNC POINT: step begun */
	STORE(STEP, step);
#endif
#ifndef POST_FIRST
	/* SYNC POINT: parked against published */
	FENCE_AFTER_STEP;
	post_all()
#endif
}

inline post_all()
{
	post_if_parked(PARKED(1), 1);
#if RANKS > 2
	post_if_parked(PARKED(2), 2)
#endif
}

proctype rank_0(byte me)
{
	byte step, sum;
	bit is_parked;
	bool is_garbage;
	{
		do
		:: step == STEPS -> break
		:: step < STEPS ->
			/* GroupMemory.settle */
#ifndef NO_SETTLE
			if
			:: ALL_LEFT
			:: HAS_ENDED -> goto stop
			fi;
#endif
			step++;
			begin();
#ifdef CHECK_FIRST
			if
			:: HAS_ENDED -> goto stop
			:: else
			fi;
#endif
			do
			:: sum < SUMS -> sum_parts(); sum++
			:: else -> break
			od;
			/* MEET. Rank 0's own word has no reader. */
#ifndef NO_GATHER
			await_others();
#endif
gather:			add(OUT(1));
#if RANKS > 2
			add(OUT(2));
#endif
			sum = 0;
			/* GroupMemory.check */
#ifndef CHECK_FIRST
			if
			:: HAS_ENDED -> goto stop
			:: else
			fi;
#endif
use:			assert(!is_garbage)
		od;
stop:		/* RankProcesses.close */
		STORE(ENDED, 1);
end:		false
	} DIES_IF_KILLED
}

proctype rank(byte me)
{
	byte step, sum;
	bool is_garbage;
	{
		do
		:: LOAD(ENDED) -> break
		:: !LOAD(ENDED) ->
			/* GroupMemory.next_step */
			if
			:: LOAD(STEP) != step
			:: LOAD(STEP) == step ->
				/* Waiter._park */
				STORE(PARKED(me), 1);
				FENCE_IN_PARK;
				if
#ifndef NO_REREAD
				:: LOAD(STEP) != step
				:: LOAD(STEP) == step ->
#else
				:: skip ->
#endif
					if
					:: IS_RUNG
					:: LOAD(ENDED)
					fi
				fi;
				leave_park(PARKED(me));
				if
				:: LOAD(STEP) != step
				:: LOAD(STEP) == step -> goto again
				fi
			fi;
begun:			atomic { assert(LOAD(STEP) == step + 1); step++ };
inputs:			assert(is_garbage || LOAD(INPUTS) == step);
			do
			:: sum < SUMS -> sum_parts(); sum++
			:: else -> break
			od;
			/* PUBLISH */
			arrive(OUT(me));
			sum = 0;
straggler:		/* A thread that comes late counts the pieces of kernels that others have done. */
			assert(is_garbage || LOAD(INPUTS) == step);
			/* SYNC POINT: step left */
			STORE(LEFT(me), step);
again:			skip
		od;
end:		false
	} unless {
		atomic { killed[me] || dead[0] -> skip };
		FENCE;
		dead[me] = true
	}
}

/* RankProcesses._watch. The store becomes visible at any time after the death. */
proctype watcher()
{
end:	atomic { dead[1] || dead[RANKS - 1] -> mem[ENDED] = 1 }
}

init
{
	atomic {
		run rank_0(0);
		run flusher(0);
		run rank(1);
		run flusher(1);
#if RANKS > 2
		run rank(2);
		run flusher(2);
#endif
		run watcher();
#ifndef NO_DEATH
		run killer()
#endif
	}
}
