/*
 * Parking for urgent outputs only.   shmllm/ipc/channel.py: CoreChannel.try_send, ClientChannel.wait
 *
 * The core sends MESSAGES outputs of MAX_SPAN or MAX_SPAN - 1 cells through a ring of CAPACITY
 * cells; the last one is urgent, any other may be. An output never wraps: if it does not fit before
 * the end of the ring, padding fills the cells up to the end. The client parks for any output or
 * for urgent ones only, as it likes. The core parks when the ring has no room. A park has NO cap.
 * The cells have no contents, and nobody closes or dies; ring.pml models that.
 *
 * Invariants
 *   I1  No process sleeps for ever while it could continue (spin's invalid end states).
 *   I2  The client's position is never beyond what the core has published (at `take`).
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef CAPACITY
#define CAPACITY 6
#endif
#define MAX_SPAN (CAPACITY / 2)
#define HALF     (CAPACITY / 2)

#define CORE   0
#define CLIENT 1

#define NO         0
#define FOR_DATA   1
#define FOR_ROOM   2
#define FOR_URGENT 3

#define PUBLISHED     0
#define CONSUMED      1
#define URGENT        2
#define CLIENT_PARKED 3
#define CORE_PARKED   4
#define WORDS         5

#include "tso.pml"

#ifdef NO_CORE_FENCE
#define FENCE_AFTER_PUBLISH NO_FENCE
#else
#define FENCE_AFTER_PUBLISH FENCE
#endif
#ifdef NO_CLIENT_FENCE
#define FENCE_IN_CLIENT_PARK NO_FENCE
#else
#define FENCE_IN_CLIENT_PARK FENCE
#endif

#ifdef NO_WORD
#define STORE_URGENT skip
#define HAS_URGENT   false
#else
#define STORE_URGENT STORE(URGENT, position)
#define HAS_URGENT   (urgent > position)
#endif

#define TO_END (CAPACITY - position % CAPACITY)
#define NEED   (span <= TO_END -> span : TO_END + span)

/* What follows each try_write. */
inline wake_client()
{
	if
	:: is_urgent ->
#ifndef WORD_FIRST
		/* SYNC POINT: record published */
		STORE_URGENT;
#endif
		FENCE_AFTER_PUBLISH;
		parked = LOAD(CLIENT_PARKED);
		if
		:: parked != NO -> POST(CLIENT)
		:: else
		fi
	:: !is_urgent ->
		FENCE_AFTER_PUBLISH;
		parked = LOAD(CLIENT_PARKED);
		if
		:: parked != NO && parked != FOR_URGENT -> POST(CLIENT)
		:: else
		fi
	fi;
	atomic { parked = NO; is_urgent = false }
}

byte last_end;	/* ghost: the position after the last output, 0 before it is published */

proctype core(byte me)
{
	byte position, consumed, tried, parked, span, sent;
	bool is_urgent;
	do
	:: sent == MESSAGES -> break
	:: sent < MESSAGES && span == 0 ->
		/* the next output */
		atomic {
			if
			:: span = MAX_SPAN - 1
			:: span = MAX_SPAN
			fi
		}
	:: span > 0 && position + NEED - consumed > CAPACITY && consumed != mem[CONSUMED] ->
		consumed = LOAD(CONSUMED)
	:: span > 0 && position + NEED - consumed <= CAPACITY ->
		if
		:: is_urgent = true
		:: sent < MESSAGES - 1
		fi;
		atomic {
			position = position + NEED;
			span = 0;
			sent++;
			last_end = (sent == MESSAGES -> position : 0)
		};
#ifdef WORD_FIRST
		if
		:: is_urgent -> STORE_URGENT
		:: else
		fi;
#endif
		/* SYNC POINT: record published */
		STORE(PUBLISHED, position);
#ifndef NO_HALF
		if
		:: !is_urgent && position - consumed >= HALF ->
			consumed = LOAD(CONSUMED);
			is_urgent = (position - consumed >= HALF)
		:: else
		fi;
#endif
		wake_client()
	:: span > 0 && position + NEED - consumed > CAPACITY && consumed == mem[CONSUMED] ->
		/* try_write has loaded the cursor and finds no room */
		tried = consumed;
#ifndef NO_FULL
		is_urgent = true;
		wake_client();
#endif
		/* Waiter._park, for room */
		STORE(CORE_PARKED, FOR_ROOM);
		FENCE;
		consumed = LOAD(CONSUMED);
		if
		:: consumed != tried
		:: consumed == tried ->
			IS_RUNG
		fi;
		leave_park(CORE_PARKED);
		atomic { tried = 0 }
	od;
end:	false
}

proctype client(byte me)
{
	byte position, published, urgent, parked;
	bool urgent_only;
	do
	:: true ->
		published = LOAD(PUBLISHED);
		if
		:: published != position ->
take:				atomic { assert(published > position); position = published };
			/* SYNC POINT: record consumed */
			STORE(CONSUMED, position);
			FENCE;
			parked = LOAD(CORE_PARKED);
			if
			:: parked == FOR_ROOM -> POST(CORE)
			:: else
			fi;
			atomic { parked = NO; published = 0 }
		:: published == position ->
			if
			:: urgent_only = true; STORE(CLIENT_PARKED, FOR_URGENT)
			:: STORE(CLIENT_PARKED, FOR_DATA)
			fi;
			/* SYNC POINT: parked against published (Waiter._park) */
			FENCE_IN_CLIENT_PARK;
			published = LOAD(PUBLISHED);
			urgent = LOAD(URGENT);
			if
			:: published != position && (!urgent_only || HAS_URGENT)
			:: else ->
				if
				:: IS_RUNG
				:: atomic { last_end > 0 && position == last_end -> goto end }
				fi
			fi;
			leave_park(CLIENT_PARKED);
			atomic { urgent_only = false; urgent = 0; published = 0 }
		fi
	od;
end:	false
}

init
{
	atomic {
		run core(CORE);
		run client(CLIENT);
		run flusher(CORE);
		run flusher(CLIENT)
	}
}
