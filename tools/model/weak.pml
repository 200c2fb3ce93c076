/*
 * Shared words in the memory of a machine that reorders loads and stores, such as aarch64.
 *
 * Stores: each process has one FIFO buffer for each word, and the flushers empty them in any order.
 * So stores to one word become visible in order, and stores to different words in any order.
 * Early loads: a load returns any value that the word had since the process's last fence, but none
 * older than one that the process has loaded already. `seen` is that value; a prefetcher renews it
 * at any time.
 * Late loads (`read`): the value comes from memory at any time up to the process's next fence, also
 * after a later store of the process has become visible. The program does not branch on it.
 * A fence waits until the process's own buffers are empty and its late load is done, and forgets
 * all that was loaded early. It is atomic_thread_fence(seq_cst).
 *
 * The model ignores dependencies between loads, and the fence of the kernel's call that follows a
 * store to a doorbell, so it allows more than the machine does. A branch comes before the stores
 * behind it, as on the machine. No process loads a word that it stores but its own doorbell, which
 * is loaded from memory behind a fence.
 *
 * The file that includes this one defines WORDS.
 */

#ifndef DEPTH
#define DEPTH 1
#endif

#define ALL_WORDS (WORDS + 2)

byte mem[ALL_WORDS];
chan buffer[2 * ALL_WORDS] = [DEPTH] of { byte };
byte num_buffered[2];
byte seen[2 * WORDS];
bool is_late[2];
byte late_word[2], late_value[2];
hidden byte each;

#define LOAD(word)         seen[me * WORDS + (word)]
#define STORE(word, value) atomic { buffer[me * ALL_WORDS + (word)]!value; num_buffered[me]++ }
#define NO_FENCE           skip
#define FENCE atomic { \
	num_buffered[me] == 0 && !is_late[me] -> \
	each = 0; \
	do \
	:: each < WORDS -> seen[me * WORDS + each] = mem[each]; each++ \
	:: each >= WORDS -> break \
	od; \
	each = 0 }

/* Load a word that has to be `value`, now or late. */
inline read(word, value)
{
	if
	:: assert(LOAD(word) == value)
	:: atomic { !is_late[me] ->
		is_late[me] = true;
		late_word[me] = word;
		late_value[me] = value }
	fi
}

proctype late_loader(byte me)
{
end:	do
	:: atomic { is_late[me] ->
		assert(mem[late_word[me]] == late_value[me]);
		is_late[me] = false;
		late_word[me] = 0;
		late_value[me] = 0 }
	od
}

proctype flusher(byte me; byte word)
{
end:	do
	:: d_step { buffer[me * ALL_WORDS + word]?mem[word] -> num_buffered[me]-- }
	od
}

proctype prefetcher(byte me; byte word)
{
end:	do
	:: d_step { LOAD(word) != mem[word] -> LOAD(word) = mem[word] }
	od
}

/* Doorbells, as in tso.pml: each process has one, which both store. */
#define BELL(whom) (WORDS + (whom))
#define POST(whom) STORE(BELL(whom), 1)
#define IS_RUNG    mem[BELL(me)]

/* Inside an atomic block of `init`: what one process stores and the other one loads. */
inline run_memory(storing, loading)
{
	for (each : 0 .. WORDS - 1) {
		run flusher(storing, each);
		run prefetcher(loading, each)
	};
	run late_loader(loading);
	run flusher(storing, BELL(storing));
	run flusher(storing, BELL(loading));
	each = 0
}

/* Waiter._park, last part, and wait.wake_if_parked after its fence, as in tso.pml. */
inline leave_park(parked_word)
{
	STORE(parked_word, 0);
	STORE(BELL(me), 0)
}

inline post_if_parked(parked_word, whom)
{
	is_parked = LOAD(parked_word);
	if
	:: is_parked -> is_parked = 0; POST(whom)
	:: else
	fi
}
