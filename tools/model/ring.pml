/*
 * One ring: publish, park, wake, close, death.   shmllm/ipc/ring.py, wait.py, channel.py
 *
 * A writer sends MESSAGES records through a ring of CAPACITY < MESSAGES cells to a reader.
 * Both park when they cannot continue: the reader waits for a record, the writer for room. A park
 * has NO cap, so a lost wake-up is a deadlock. A kill may end either process at any point. The
 * reader may close at any point; the writer closes after its last record and stays alive.
 *
 * Invariants
 *   I1  The k-th record read is the k-th written, whole: none lost, torn, duplicated,
 *       reordered, or read before it was published (assertion at `read`).
 *   I2  A record that has not been read to its end is not overwritten (`claim`).
 *   I3  No process sleeps for ever while it could continue, or after the peer closed or died
 *       (spin's invalid end states; the label `end` marks the only valid ones).
 *   I4  A reader that stops because the writer closed has read every record; one that stops
 *       because the writer died has read every record that was published (at `stop`).
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef CAPACITY
#define CAPACITY 2
#endif

#define WRITER 0
#define READER 1

#define PUBLISHED     0
#define CONSUMED      1
#define READER_PARKED 2
#define WRITER_PARKED 3
#define WRITER_CLOSED 4
#define READER_CLOSED 5
#define HEADER(position)  (6 + 2 * ((position) % CAPACITY))
#define PAYLOAD(position) (7 + 2 * ((position) % CAPACITY))
#define WORDS (6 + 2 * CAPACITY)

#include "tso.pml"

/* Broken variants, one -D each. */
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

byte num_read;	/* ghost: records that the reader has read to their end */
bool is_silent;	/* ghost: the writer sent its last record and will not close */

proctype writer(byte me)
{
	byte position, consumed;
	bit is_parked, is_closed;
	{
		do
		:: position == MESSAGES -> break
		:: position < MESSAGES && position - consumed < CAPACITY ->
claim:			atomic { assert(position - num_read < CAPACITY);
#ifdef PUBLISH_FIRST
			STORE(PUBLISHED, position + 1) };
			STORE(HEADER(position), position + 1);
			STORE(PAYLOAD(position), position + 1);
#else
			STORE(HEADER(position), position + 1) };
			STORE(PAYLOAD(position), position + 1);
#ifdef POST_FIRST
			FENCE_AFTER_PUBLISH;
			post_if_parked(READER_PARKED, READER);
#endif
			/* SYNC POINT: record published */
			STORE(PUBLISHED, position + 1);
#endif
			position++;
#ifndef POST_FIRST
			/* SYNC POINT: parked against published */
			FENCE_AFTER_PUBLISH;
			post_if_parked(READER_PARKED, READER);
#endif
		:: position < MESSAGES && position - consumed >= CAPACITY ->
			/* SYNC POINT: record consumed */
			consumed = LOAD(CONSUMED);
			if
			:: position - consumed < CAPACITY
			:: else ->
				/* Waiter._park, for room */
				STORE(WRITER_PARKED, 1);
				FENCE_IN_WRITER_PARK;
				is_closed = LOAD(READER_CLOSED);
				consumed = LOAD(CONSUMED);
				if
				:: is_closed -> goto stop
				:: !is_closed && position - consumed < CAPACITY
				:: !is_closed && position - consumed >= CAPACITY ->
					if
					:: IS_RUNG
					:: atomic { dead[READER] -> goto stop }
					fi
				fi;
				leave_park(WRITER_PARKED)
			fi
		od;
		if
		:: is_silent = true; goto end
		:: skip
		fi;
stop:		/* ClientChannel.set_closing */
		STORE(WRITER_CLOSED, 1);
		FENCE;
		post_if_parked(READER_PARKED, READER);
end:		false
	} DIES_IF_KILLED
}

proctype reader(byte me)
{
	byte position, published, value;
	bit is_parked, is_closed, is_gone;
	{
		do
		:: /* The reader checks BEFORE the ring whether the peer is dead or closed: then it
		    * sees all records that the peer published before that. */
#ifndef RING_BEFORE_DEATH
			is_gone = dead[WRITER];
			is_closed = LOAD(WRITER_CLOSED);
#endif
			/* SYNC POINT: record published */
			published = LOAD(PUBLISHED);
#ifdef RING_BEFORE_DEATH
			is_gone = dead[WRITER];
			is_closed = LOAD(WRITER_CLOSED);
#endif
			if
			:: published != position ->
#ifdef CONSUME_FIRST
				STORE(CONSUMED, published);
#endif
				do
				:: position != published ->
read:					value = LOAD(HEADER(position));
					atomic { assert(value == position + 1); value = 0 };
					value = LOAD(PAYLOAD(position));
					atomic {
						assert(value == position + 1);
						value = 0;
						position++;
						num_read++
					}
				:: else -> break
				od;
				/* SYNC POINT: record consumed. Once for the whole batch. */
#ifndef CONSUME_FIRST
				STORE(CONSUMED, position);
#endif
#ifndef ROOM_UNRUNG
				FENCE_AFTER_CONSUME;
				post_if_parked(WRITER_PARKED, WRITER)
#endif
			:: published == position && (is_gone || is_closed) -> break
			:: published == position && !is_gone && !is_closed ->
				/* SYNC POINT: parked against published (Waiter._park) */
				STORE(READER_PARKED, 1);
				FENCE_IN_READER_PARK;
				is_closed = LOAD(WRITER_CLOSED);
#ifndef NO_REREAD
				published = LOAD(PUBLISHED);
#endif
				if
				:: published != position || is_closed
				:: published == position && !is_closed ->
					if
					:: IS_RUNG
					:: dead[WRITER]
					:: atomic { is_silent && position == MESSAGES -> goto end }
					fi
				fi;
				leave_park(READER_PARKED)
			fi
		:: /* closes early, at any point */
			STORE(READER_CLOSED, 1);
			FENCE;
			post_if_parked(WRITER_PARKED, WRITER);
			goto end
		od;
stop:		atomic {
			assert(!is_closed || position == MESSAGES);
			assert(position == LOAD(PUBLISHED))
		};
end:		false
	} DIES_IF_KILLED
}

init
{
	atomic {
		run writer(WRITER);
		run reader(READER);
		run flusher(WRITER);
		run flusher(READER);
		run killer()
	}
}
