/*
 * Tensor slots: two growing words for each slot.   shmllm/ipc/slots.py
 *
 * A writer sends MESSAGES > SLOTS payloads through SLOTS slots to a reader. A record in a ring
 * names the slot of each payload; the ring is reduced to an array of references and a published
 * word (ring.pml models the complete ring). The reader keeps views for any time and releases them
 * in any order. The writer searches until it finds a free slot. A kill may end either process at
 * any point.
 *
 * Invariants
 *   I1  A slot is not claimed while the reader has a view of it or may yet get one (in the writer).
 *   I2  Each view shows the payload that its reference was published with, whole, at its
 *       first read and at its last (`view`, `release`). The size that the reader checks a
 *       reference against belongs to the same publication, at both times (`check`, `release`).
 *   I3  A received reference names a published slot, so SlotReader._check raises no error for a
 *       correct peer; and published - released is 0 or 1 for both ends (`check`).
 *   I4  A reader that ends has read each payload once. No process hangs (invalid end states).
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#define SLOTS 2

#define WRITER 0
#define READER 1

#define PUBLISHED(slot) (0 + (slot))
#define RELEASED(slot)  (2 + (slot))
#define PAYLOAD_A(slot) (4 + (slot))
#define PAYLOAD_B(slot) (6 + (slot))
#define SIZE(slot)      (8 + (slot))
#define RECORD_PUBLISHED 10
#define RECORD(position) (11 + (position))
#define WORDS (11 + MESSAGES)

#include "tso.pml"

#ifdef NO_RELEASED_CHECK
#define LOOKS_FREE true
#else
#define LOOKS_FREE (published[slot] == LOAD(RELEASED(slot)))
#endif

bool is_lent[SLOTS];	/* ghost: true from the claim until the release, without store buffers */

proctype writer(byte me)
{
	byte position, slot;
	byte published[SLOTS];	/* the values that this process stored in its own words */
	{
		do
		:: position == MESSAGES -> break
		:: position < MESSAGES && !dead[READER] ->
			if
			:: slot = 0
			:: slot = 1
			fi;
			if
			:: atomic { LOOKS_FREE ->
				/* SYNC POINT: slot published, slot released */
				assert(!is_lent[slot]);
				is_lent[slot] = true }
				STORE(PAYLOAD_A(slot), position + 1);
#ifdef PUBLISH_FIRST
				STORE(RECORD(position), slot);
				STORE(RECORD_PUBLISHED, position + 1);
#endif
				STORE(PAYLOAD_B(slot), position + 1);
#ifndef SIZE_LAST
				STORE(SIZE(slot), position + 1);
#endif
				/* SYNC POINT: slot published */
				published[slot]++;
				STORE(PUBLISHED(slot), published[slot]);
#ifndef PUBLISH_FIRST
				STORE(RECORD(position), slot);
				STORE(RECORD_PUBLISHED, position + 1);
#endif
#ifdef SIZE_LAST
				STORE(SIZE(slot), position + 1);
#endif
				atomic { position++; slot = 0 }
			:: atomic { !LOOKS_FREE -> slot = 0 }
			fi
		:: position < MESSAGES && dead[READER] -> break
		od;
end:		false
	} DIES_IF_KILLED
}

/* `held[slot]`: the number of the payload of the reader's view, 0 for no view. */
proctype reader(byte me)
{
	byte position, slot, value;
	byte held[SLOTS];
	byte released[SLOTS];
	{
		do
		:: position < MESSAGES && LOAD(RECORD_PUBLISHED) > position ->
			slot = LOAD(RECORD(position));
check:			atomic { assert(LOAD(PUBLISHED(slot)) - released[slot] == 1) };
			/* SlotReader._check: the bytes of this publication */
			atomic { assert(LOAD(SIZE(slot)) == position + 1) };
			value = LOAD(PAYLOAD_A(slot));
view:			atomic {
				assert(value == position + 1);
				position++;
				held[slot] = position;
				slot = 0;
				value = 0
			}
		:: atomic { held[0] > 0 -> slot = 0 }; goto release
		:: atomic { held[1] > 0 -> slot = 1 };
release:
#ifdef RELEASE_FIRST
			released[slot]++;
			atomic { STORE(RELEASED(slot), released[slot]); is_lent[slot] = false };
#endif
			value = LOAD(PAYLOAD_B(slot));
			atomic { assert(value == held[slot]); value = 0 };
			atomic { assert(LOAD(SIZE(slot)) == held[slot]); held[slot] = 0 };
			/* SYNC POINT: slot released */
#ifndef RELEASE_FIRST
			released[slot]++;
			atomic { is_lent[slot] = false; STORE(RELEASED(slot), released[slot]) };
#endif
			slot = 0
		:: position == MESSAGES && held[0] == 0 && held[1] == 0 -> break
		:: position < MESSAGES && dead[WRITER] && LOAD(RECORD_PUBLISHED) == position &&
		   held[0] == 0 && held[1] == 0 -> break
		od;
end:		false
	} DIES_IF_KILLED
}

#ifdef OUTSIDER
/* A third process that subtracts the two words of a slot, as a tool could do. */
proctype outsider()
{
	byte slot, published, released;
	if
	:: slot = 0
	:: slot = 1
	fi;
	published = LOAD(PUBLISHED(slot));
	released = LOAD(RELEASED(slot));
inspect: assert(released <= published && published <= released + 1)
}
#endif

init
{
	atomic {
		run writer(WRITER);
		run reader(READER);
		run flusher(WRITER);
		run flusher(READER);
#ifdef OUTSIDER
		run outsider();
#endif
		run killer()
	}
}
