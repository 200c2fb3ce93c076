/*
 * A prefix cache that several engines share: pins against reuse.   docs/ipc.md, "Shared prefix cache"
 *
 * One block in the region of an owner, and one or two readers, each with one pin for that block in a
 * region of its own. The owner fills the block with content after content, whose keys alternate. A
 * reader asks ROUNDS times for any key: its index is stale or torn, so that the block is only a
 * candidate. A reader joins at any time. A kill may end the owner once and each reader once, at any
 * point. Then another engine may take the region of the dead one over, as its owner or in the
 * reader's place, or nobody does.
 *
 * Kernel objects: the lock of each reader's region (`is_locked`), and the entry of its file in the
 * folder (`is_linked`). Each system call is one step. With SWEEP a sweeper may remove the file of a
 * dead reader; who takes a place and who sweeps exclude each other by the sweepers' lock.
 *
 * The owner's first look at the pins is left out, because it only saves work: here the owner also
 * tries blocks that are in use.
 *
 * Invariants
 *   I1  What a reader with a validated pin reads is the data of the key that it asked for, whole, at
 *       each read (at `view`).
 *   I2  The owner writes no block that a live reader has a validated pin on (at `overwrite`).
 *   I3  When each reader has cleared its pin or is dead, the owner can reuse the block (at `reuse`).
 *   I4  No process waits for ever (spin's invalid end states).
 */

#ifndef READERS
#define READERS 1
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef TRIES
#define TRIES 3	/* of the owner to fill the block, before a last one when no reader is left */
#endif

#define OWNER     0	/* readers are 1, 2 */
#define PROCESSES (READERS + 1)

#define GENERATION   0	/* even: valid */
#define KEY_A        1
#define KEY_B        2
#define DATA_A       3
#define DATA_B       4
#define PIN(reader)  (4 + (reader))
#define WORDS        (5 + READERS)

#include "tso.pml"

/* Keys of two words: 1 is (1, 1), 2 is (2, 2); 3 is (1, 2), which no content has, but a torn key. */
#define FIRST_WORD(key)  ((key) == 2 -> 2 : 1)
#define SECOND_WORD(key) ((key) == 1 -> 1 : 2)
#define CONTENT(fill)    (2 - (fill) % 2)	/* its key, which is also its data */

/* Variants, one -D each. README.md says which of them are broken. */
#ifdef NO_READER_FENCE
#define FENCE_AFTER_PIN NO_FENCE
#else
#define FENCE_AFTER_PIN FENCE
#endif
#ifdef NO_OWNER_FENCE
#define FENCE_AFTER_ODD NO_FENCE
#else
#define FENCE_AFTER_ODD FENCE
#endif
#ifdef TOGGLE
#define NEXT(number) (((number) + 1) % 2)
#else
#define NEXT(number) ((number) + 1)
#endif
#ifdef RESTORE_SAME
#define RESTORED (generation - 1)
#else
#define RESTORED NEXT(generation)
#endif
#ifdef NO_RECHECK
#define NO_GENERATION_AFTER
#define NO_KEY_AFTER
#endif
#ifdef NO_GENERATION_AFTER
#define IS_UNCHANGED true
#elif defined(PIN_AT_ONCE)
#define IS_UNCHANGED (LOAD(GENERATION) % 2 == 0)
#else
#define IS_UNCHANGED (LOAD(GENERATION) == generation)
#endif
#ifdef IGNORE_LOCK
#define IS_ALIVE(reader) true
#elif defined(EARLY_LOCK)
#define IS_ALIVE(reader) was_locked[reader]
#else
#define IS_ALIVE(reader) is_locked[reader]
#endif
#ifdef EARLY_LIST
#define IS_FOUND(reader) was_linked[reader]
#else
#define IS_FOUND(reader) is_linked[reader]
#endif

bool is_locked[PROCESSES];
bool is_linked[PROCESSES];
#ifdef SWEEP
#define NOBODY  0
#define SWEEPER PROCESSES
byte sweep_lock;
#endif
bool reads[PROCESSES];		/* ghost: this reader has a validated pin and lives */
bool is_done[PROCESSES];	/* ghost: this reader pins nothing any more */

#if READERS == 1
#define NOBODY_READS (!reads[1])
#define ALL_DONE     (is_done[1] && empty(buffer[1]))
#else
#define NOBODY_READS (!reads[1] && !reads[2])
#define ALL_DONE     (is_done[1] && empty(buffer[1]) && is_done[2] && empty(buffer[2]))
#endif

/* The owner's look at the pins of all live readers, behind its odd generation. */
inline look_at_pins()
{
	in_use = false;
	who = 1;
	do
	:: who <= READERS ->
		if
		:: IS_FOUND(who) ->
#ifdef LOCK_THEN_PIN
			if
			:: IS_ALIVE(who) ->
				/* SYNC POINT: pin against generation */
				if
				:: LOAD(PIN(who)) -> in_use = true
				:: else
				fi
			:: else
			fi
#else
			/* SYNC POINT: pin against generation */
			if
			:: LOAD(PIN(who)) ->
				if
				:: IS_ALIVE(who) -> in_use = true
				:: else
				fi
			:: else
			fi
#endif
		:: else
		fi;
		who++
	:: else -> break
	od;
	who = 0
}

/* With an early look: what the owner knows of the readers before its odd generation. */
#define REMEMBER(copy, original) \
	atomic { \
		for (who : 1 .. READERS) { copy[who] = original[who] }; \
		who = 0 }

/* One try to fill the block; `in_use` says afterwards that a pin prevented it. */
inline fill_block()
{
#ifdef EARLY_LIST
	REMEMBER(was_linked, is_linked);
#endif
#ifdef EARLY_LOCK
	REMEMBER(was_locked, is_locked);
#endif
#ifdef EARLY_PINS
	look_at_pins();
#endif
	if
	:: generation % 2 == 0 ->
		atomic {
			STORE(GENERATION, NEXT(generation));
			generation = NEXT(generation);
			is_intact = true }
		/* SYNC POINT: pin against generation */
		FENCE_AFTER_ODD
	:: else
	fi;
#ifndef EARLY_PINS
#ifdef FREE_UNCHECKED
	if
	:: is_intact -> look_at_pins()
	:: else -> in_use = false
	fi;
#else
	look_at_pins();
#endif
#endif
	if
#ifdef OVERWRITE_PINNED
	:: true ->
#else
	:: !in_use ->
#endif
		is_intact = false;
#ifdef PUBLISH_FIRST
		STORE(GENERATION, NEXT(generation));
#endif
overwrite:	atomic {
			assert(NOBODY_READS);
			STORE(DATA_A, CONTENT(fill)) };
		STORE(DATA_B, CONTENT(fill));
		STORE(KEY_A, FIRST_WORD(CONTENT(fill)));
		STORE(KEY_B, SECOND_WORD(CONTENT(fill)));
		/* SYNC POINT: block published */
#ifndef PUBLISH_FIRST
		STORE(GENERATION, NEXT(generation));
#endif
		atomic {
			generation = NEXT(generation);
			fill++ }
#ifndef OVERWRITE_PINNED
	:: in_use && is_intact ->
#ifdef NO_RESTORE
		is_intact = false
#else
		/* The content is still there. */
		atomic {
			STORE(GENERATION, RESTORED);
			generation = RESTORED;
			is_intact = false }
#endif
	:: in_use && !is_intact	/* a later try may find it unpinned */
#endif
	fi
}

proctype owner(byte me)
{
	byte generation, tries, who;
	byte fill = 1;
	bool is_intact, in_use;
#ifdef EARLY_LOCK
	bool was_locked[PROCESSES];
#endif
#ifdef EARLY_LIST
	bool was_linked[PROCESSES];
#endif
	do
	:: {
		/* The first owner, or an engine that takes its region over. */
		generation = mem[GENERATION];
#ifdef ADOPT_AS_VALID
		if
		:: generation % 2 == 1 && fill > 1 -> atomic {
			STORE(GENERATION, NEXT(generation));
			generation = NEXT(generation) }
		:: else
		fi;
#endif
		do
		:: tries < TRIES -> tries++; fill_block()
		:: atomic { tries == TRIES && ALL_DONE -> tries++ }
		:: tries > TRIES ->
			fill_block();
reuse:			assert(!in_use);
			break
		od;
		break
	} unless {
		atomic { killed[me] -> killed[me] = false };
		atomic { FENCE ->
			generation = 0;
			who = 0;
			is_intact = false;
			in_use = false;
			if
			:: true
			:: break	/* nobody takes its region */
			fi }
	}
	od
}

/* Compare the key of the candidate with the one that is asked for. */
inline compare_key(otherwise)
{
	if
	:: LOAD(KEY_A) == FIRST_WORD(key)
	:: else -> goto otherwise
	fi;
	if
	:: LOAD(KEY_B) == SECOND_WORD(key)
	:: else -> goto otherwise
	fi
}

proctype reader(byte me)
{
	byte rounds, key, generation;
	do
	:: {
#ifndef LOCK_LATE
#ifdef SWEEP
		atomic { sweep_lock == NOBODY -> sweep_lock = me };
		is_locked[me] = true;
		sweep_lock = NOBODY;	/* if the name is gone, the link below stands for a new file */
#else
		is_locked[me] = true;
#endif
#endif
#ifndef NO_CLEAR
		STORE(PIN(me), 0);	/* those of the dead one whose place it is */
#endif
#ifndef LINK_LATE
		is_linked[me] = true;
#endif
		do
		:: rounds == ROUNDS -> break
		:: rounds < ROUNDS ->
			atomic { rounds++; select(key : 1 .. 3) };
#ifndef PIN_AT_ONCE
			generation = LOAD(GENERATION);
			if
			:: generation % 2 == 0
			:: else -> goto next
			fi;
			compare_key(next);
#endif
			/* SYNC POINT: pin against generation */
			STORE(PIN(me), 1);
			FENCE_AFTER_PIN;
			if
			:: IS_UNCHANGED
			:: else -> goto miss
			fi;
#ifndef NO_KEY_AFTER
			compare_key(miss);
#endif
			reads[me] = true;
#ifdef LINK_LATE
			is_linked[me] = true;
#endif
#ifdef LOCK_LATE
			is_locked[me] = true;
#endif
view:			do
			:: assert(LOAD(DATA_A) == key)
			:: assert(LOAD(DATA_B) == key)
			:: break
			od;
#ifdef UNPIN_FIRST
			STORE(PIN(me), 0);
			assert(LOAD(DATA_A) == key);
			reads[me] = false;
			goto next;
#endif
miss:			atomic {
				STORE(PIN(me), 0);
				reads[me] = false }
next:			atomic { key = 0; generation = 0 }
		od;
		break
	} unless {
		atomic { killed[me] -> killed[me] = false; reads[me] = false };
		atomic { FENCE ->
			is_locked[me] = false;
#ifdef SWEEP
			sweep_lock = (sweep_lock == me -> NOBODY : sweep_lock);
#endif
			key = 0;
			generation = 0;
			if
			:: true
			:: break	/* nobody takes its place */
			fi }
	}
	od;
	is_done[me] = true
}

#ifdef SWEEP
/* registry.sweep, once: removes the file of the first reader if nobody holds its lock. */
proctype sweeper()
{
#ifdef TEST_FIRST
end:	!is_locked[1] && is_linked[1];
	atomic { sweep_lock == NOBODY -> sweep_lock = SWEEPER };
	is_linked[1] = false;
#else
	atomic { sweep_lock == NOBODY -> sweep_lock = SWEEPER };
	if
	:: !is_locked[1] && is_linked[1] -> is_linked[1] = false
	:: else
	fi;
#endif
	sweep_lock = NOBODY
}
#endif

proctype kills()
{
	byte who;
	do
	:: who < PROCESSES ->
		if
#ifdef NO_DEATH
		:: skip
#else
		:: killed[who] = true
		:: skip
#endif
		fi;
		who++
	:: else -> break
	od
}

init
{
	atomic {
		mem[GENERATION] = 1;
		run owner(OWNER);
		run reader(1);
		run flusher(OWNER);
		run flusher(1);
#if READERS == 2
		run reader(2);
		run flusher(2);
#endif
#ifdef SWEEP
		run sweeper();
#endif
		run kills()
	}
}
