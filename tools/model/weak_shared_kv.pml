/*
 * The shared prefix cache on a machine that reorders.   docs/ipc.md, "Shared prefix cache"
 *
 * The same as shared_kv.pml with one reader, one word of key and one of data, without joining, locks
 * and death. Only the fences are modelled without which spin finds a failure.
 *
 * Invariants
 *   I1  What a reader with a validated pin reads, now or late, is the data of the key that it asked
 *       for (at `view`).
 *   I2  When the reader has cleared its pin, the owner can reuse the block (at `reuse`).
 */

#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef TRIES
#define TRIES 3
#endif

#define OWNER  0
#define READER 1

#define GENERATION 0
#define KEY        1
#define DATA       2
#define PIN        3
#define WORDS      4

#include "weak.pml"

#define CONTENT(fill) (2 - (fill) % 2)

#ifdef NO_RELEASE_GENERATION
#define FENCE_BEFORE_EVEN NO_FENCE
#else
#define FENCE_BEFORE_EVEN FENCE
#endif
#ifdef NO_OWNER_FENCE
#define FENCE_AFTER_ODD NO_FENCE
#else
#define FENCE_AFTER_ODD FENCE
#endif
#ifdef NO_READER_FENCE
#define FENCE_AFTER_PIN NO_FENCE
#else
#define FENCE_AFTER_PIN FENCE
#endif
#ifdef NO_ACQUIRE_GENERATION
#define FENCE_AFTER_LOAD NO_FENCE
#else
#define FENCE_AFTER_LOAD FENCE
#endif
#ifdef NO_RELEASE_PIN
#define FENCE_BEFORE_CLEAR NO_FENCE
#else
#define FENCE_BEFORE_CLEAR FENCE
#endif

bool is_done;	/* ghost */

/* One try to fill the block; `in_use` says afterwards that a pin prevented it. */
inline fill_block()
{
	if
	:: generation % 2 == 0 ->
		STORE(GENERATION, generation + 1);
		generation++;
		/* SYNC POINT: pin against generation */
		FENCE_AFTER_ODD
	:: else
	fi;
	in_use = LOAD(PIN);
	if
	:: in_use ->
		/* The content is still there. */
		STORE(GENERATION, generation + 1);
		generation++
	:: !in_use ->
		/* The branch on the pin comes before the next stores. */
		STORE(DATA, CONTENT(fill));
		STORE(KEY, CONTENT(fill));
		/* SYNC POINT: block published */
		FENCE_BEFORE_EVEN;
		STORE(GENERATION, generation + 1);
		generation++;
		fill++
	fi
}

proctype owner(byte me)
{
	byte generation = 1, fill = 1, tries;
	bool in_use;
	do
	:: tries < TRIES -> tries++; fill_block()
	:: atomic { tries == TRIES && is_done && num_buffered[READER] == 0 -> tries++ }
	:: tries > TRIES ->
		FENCE;	/* time passes: an early load does not stay old for ever */
		fill_block();
reuse:		assert(!in_use);
		break
	od
}

proctype reader(byte me)
{
	byte rounds, key, generation;
	do
	:: rounds == ROUNDS -> break
	:: rounds < ROUNDS ->
		atomic { rounds++; select(key : 1 .. 2) };
#ifndef PIN_AT_ONCE
		generation = LOAD(GENERATION);
#ifdef NO_KEY_AFTER
#ifndef NO_ACQUIRE_CANDIDATE
		FENCE;
#endif
#endif
		if
		:: generation % 2 == 0 && LOAD(KEY) == key
		:: else -> goto next
		fi;
#endif
		STORE(PIN, 1);
		/* SYNC POINT: pin against generation */
		FENCE_AFTER_PIN;
		if
#ifdef PIN_AT_ONCE
		:: LOAD(GENERATION) % 2 == 0
#else
		:: LOAD(GENERATION) == generation
#endif
		:: else -> goto miss
		fi;
		/* SYNC POINT: block published */
		FENCE_AFTER_LOAD;
#ifndef NO_KEY_AFTER
		if
		:: LOAD(KEY) == key
		:: else -> goto miss
		fi;
#endif
		do
		:: true ->
view:			read(DATA, key)
		:: break
		od;
		/* SYNC POINT: pin cleared */
		FENCE_BEFORE_CLEAR;
miss:		STORE(PIN, 0);
next:		atomic { key = 0; generation = 0 }
	od;
	is_done = true
}

init
{
	atomic {
		mem[GENERATION] = 1;
		seen[OWNER * WORDS + GENERATION] = 1;
		seen[READER * WORDS + GENERATION] = 1;
		run owner(OWNER);
		run reader(READER);
		run_memory(OWNER, READER);
		run_memory(READER, OWNER)
	}
}
