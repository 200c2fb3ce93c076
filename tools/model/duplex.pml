/*
 * Two rings between two processes that both wait: requests and outputs.
 * shmllm/ipc/channel.py, and the loops in shmllm/client/channel_client.py, shmllm/engine/process.py
 *
 * The client sends REQUESTS records; the core answers each with OUTPUTS_EACH records. Each
 * process has one doorbell and one parked word for all its conditions: the client waits for
 * outputs and for room in the request ring, the core for requests and for room in the output
 * ring. Parks have NO cap. Records carry one word; ring.pml models whole records.
 *
 * The core never blocks on a write: outputs that do not fit wait in its backlog. The backlog of
 * this model holds the outputs of one request, so the core takes no request while the backlog is
 * not empty. The client drains its outputs while it waits for room.
 *
 * Invariants
 *   I1  Both directions deliver all records, each once and in order (at `take`).
 *   I2  Nobody sleeps for ever (spin's invalid end states).
 *   I3  Unless the core died, the client ends with all outputs (at `stop`).
 */

#ifndef REQUESTS
#define REQUESTS 3
#endif
#ifndef CAPACITY
#define CAPACITY 1
#endif
#define OUTPUTS_EACH 2

#define CLIENT 0
#define CORE   1

#define REQUEST_PUBLISHED 0
#define REQUEST_CONSUMED  1
#define OUTPUT_PUBLISHED  2
#define OUTPUT_CONSUMED   3
#define CLIENT_PARKED     4
#define CORE_PARKED       5
#define CLIENT_CLOSED     6
#define REQUEST(position) (7 + (position) % CAPACITY)
#define OUTPUT(position)  (7 + CAPACITY + (position) % CAPACITY)
#define WORDS (7 + 2 * CAPACITY)

#include "tso.pml"

#ifdef NO_CLIENT_FENCE
#define FENCE_IN_CLIENT_PARK NO_FENCE
#else
#define FENCE_IN_CLIENT_PARK FENCE
#endif
#ifdef NO_CORE_FENCE
#define FENCE_IN_CORE_PARK NO_FENCE
#else
#define FENCE_IN_CORE_PARK FENCE
#endif

#ifdef NO_DRAIN	/* the client drains outputs only after it sent all requests */
#define LOOKS_AT_OUTPUTS (sent == REQUESTS)
#else
#define LOOKS_AT_OUTPUTS true
#endif

#define HAS_ROOM (sent < REQUESTS && sent - consumed < CAPACITY)

proctype client(byte me)
{
	byte sent, consumed, received, published, value;
	bit is_parked;
	{
		do
		:: sent == REQUESTS && received == REQUESTS * OUTPUTS_EACH -> break
		:: HAS_ROOM ->
			STORE(REQUEST(sent), sent + 1);
			/* SYNC POINT: record published */
			STORE(REQUEST_PUBLISHED, sent + 1);
			sent++;
			/* SYNC POINT: parked against published */
			FENCE;
			post_if_parked(CORE_PARKED, CORE)
		:: !HAS_ROOM && !(sent == REQUESTS && received == REQUESTS * OUTPUTS_EACH) ->
			/* no room, or all sent: drain (`on_full`), then park */
			published = LOAD(OUTPUT_PUBLISHED);
			if
			:: LOOKS_AT_OUTPUTS && published != received ->
				do
				:: received != published ->
take:					value = LOAD(OUTPUT(received));
					atomic { assert(value == received + 1); value = 0; received++ }
				:: else -> break
				od;
				/* SYNC POINT: record consumed */
				STORE(OUTPUT_CONSUMED, received);
#ifndef ROOM_UNRUNG
				FENCE;
				post_if_parked(CORE_PARKED, CORE)
#endif
			:: else
			fi;
			if
			:: received == REQUESTS * OUTPUTS_EACH && sent == REQUESTS
			:: else ->
				STORE(CLIENT_PARKED, 1);
				FENCE_IN_CLIENT_PARK;
				consumed = LOAD(REQUEST_CONSUMED);
				published = LOAD(OUTPUT_PUBLISHED);
				if
				:: HAS_ROOM
				:: !HAS_ROOM && LOOKS_AT_OUTPUTS && published != received
				:: else ->
					if
					:: IS_RUNG
					:: atomic { dead[CORE] -> goto end }
					fi
				fi;
				leave_park(CLIENT_PARKED);
				consumed = LOAD(REQUEST_CONSUMED)
			fi
		od;
stop:		assert(received == REQUESTS * OUTPUTS_EACH);
		/* ClientChannel.set_closing */
		STORE(CLIENT_CLOSED, 1);
		FENCE;
		post_if_parked(CORE_PARKED, CORE);
end:		false
	} DIES_IF_KILLED
}

proctype core(byte me)
{
	byte taken, published, backlog, written, consumed, value;
	bit is_parked, is_closed;
	{
		do
		:: backlog > 0 && written - consumed < CAPACITY ->
			STORE(OUTPUT(written), written + 1);
			/* SYNC POINT: record published */
			STORE(OUTPUT_PUBLISHED, written + 1);
			atomic { written++; backlog-- };
			/* SYNC POINT: parked against published */
			FENCE;
			post_if_parked(CLIENT_PARKED, CLIENT)
		:: backlog == 0 && taken != published ->
take:			value = LOAD(REQUEST(taken));
			atomic { assert(value == taken + 1); value = 0; taken++; backlog = OUTPUTS_EACH };
			/* SYNC POINT: record consumed */
			STORE(REQUEST_CONSUMED, taken);
#ifndef ROOM_UNRUNG
			FENCE;
			post_if_parked(CLIENT_PARKED, CLIENT)
#endif
		:: (backlog > 0 && written - consumed >= CAPACITY) || (backlog == 0 && taken == published) ->
			/* CoreWaiter.wait */
			STORE(CORE_PARKED, 1);
			FENCE_IN_CORE_PARK;
			is_closed = LOAD(CLIENT_CLOSED);
			published = LOAD(REQUEST_PUBLISHED);
			consumed = LOAD(OUTPUT_CONSUMED);
			if
			:: is_closed -> break
			:: !is_closed && ((backlog > 0 && written - consumed < CAPACITY) ||
			   (backlog == 0 && taken != published))
			:: else ->
				if
				:: IS_RUNG
				:: atomic { dead[CLIENT] -> goto end }
				fi
			fi;
			leave_park(CORE_PARKED);
			published = LOAD(REQUEST_PUBLISHED);
			consumed = LOAD(OUTPUT_CONSUMED)
		od;
end:		false
	} DIES_IF_KILLED
}

init
{
	atomic {
		run client(CLIENT);
		run core(CORE);
		run flusher(CLIENT);
		run flusher(CORE);
		run killer()
	}
}
