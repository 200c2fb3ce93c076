/*
 * Shared words in the memory model of x86-64 (TSO). A store goes into its process's own FIFO
 * buffer and becomes visible when the flusher takes it out, at any later time. A load reads
 * memory. A fence waits until the process's own buffer is empty.
 *
 * A load does not read its process's own buffer, because no process here loads a word that it
 * stores: every shared word has one writing process, which keeps the value in a variable. Doorbells
 * are the exception, and a process loads its own one only behind a fence.
 *
 * A call of the kernel behind a store to a doorbell would empty the buffer as well. The models leave
 * that out, so they allow more than the machine does.
 *
 * The file that includes this one defines WORDS, and PROCESSES unless there are two.
 */

#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef PROCESSES
#define PROCESSES 2
#endif

byte mem[WORDS + PROCESSES];
chan buffer[PROCESSES] = [DEPTH] of { byte, byte };

#define LOAD(word)         mem[word]
#define STORE(word, value) buffer[me]!word,value
#define FENCE              empty(buffer[me])
#define NO_FENCE           skip

/* Each process has one doorbell: a word that posters set and its waiter clears. The kernel, which
 * compares it with 0 before the waiter sleeps and whenever a poster wakes it, reads memory. */
#define BELL(whom)  (WORDS + (whom))
#define POST(whom)  STORE(BELL(whom), 1)
#define IS_RUNG     mem[BELL(me)]

/* kill -9 at any point. `dead` is the pidfd: the kernel sets it after all stores of the process
 * have become visible. */
bool killed[PROCESSES];
bool dead[PROCESSES];

#define DIES_IF_KILLED unless { atomic { killed[me] -> skip }; FENCE; dead[me] = true }

proctype flusher(byte me)
{
	byte word, value;
end:	do
	:: d_step { buffer[me]?word,value -> mem[word] = value; word = 0; value = 0 }
	od
}

proctype killer()
{
	if
	:: killed[0] = true
	:: killed[1] = true
#if PROCESSES > 2
	:: killed[2] = true
#endif
	:: skip
	fi
}

/* Waiter._park, last part: parked = 0, Doorbell.drain; the caller then checks again. */
inline leave_park(parked_word)
{
	STORE(parked_word, 0);
	STORE(BELL(me), 0)
}

/* wait.wake_if_parked, after its fence. Load and post are two steps. */
inline post_if_parked(parked_word, whom)
{
	is_parked = LOAD(parked_word);
	if
	:: is_parked -> is_parked = 0; POST(whom)
	:: else
	fi
}
