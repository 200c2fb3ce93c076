/*
 * One name in /dev/shm: owners that start, stop and die, a sweeper, and one who attaches.
 * shmllm/ipc/segment.py: create, take_ownership; registry.py: publish, sweep, withdraw, attach
 *
 * Kernel objects: one directory entry, and inodes with a lock each: inode k is the file of
 * creator k (kept while anybody holds it open, so its number is not reused meanwhile), inode
 * DEAD may lie there at the start, left by an owner that was killed.
 * The kernel frees the locks of a process that dies. Each system call is one step. Loads and
 * stores need no buffers here: the calls between them order them.
 *
 * Creation: unnamed file, lock it, initialise it, link it if the name is absent. If the name
 * exists: open it and try its lock. Refused: somebody runs. Granted: it is dead, and if the
 * name still leads to this inode, unlink it while holding the lock; then try again.
 * A sweep is the same without the link. An owner that stops unlinks its name and then
 * gives up its lock.
 *
 * Invariants
 *   I1  Two live owners of the name never exist (at `owns`).
 *   I2  The name of a live owner is not removed by anybody else (at each unlink).
 *   I3  Whoever opens the name finds an initialised segment (`attached`).
 *   I4  Every process comes to an end (spin's invalid end states).
 *   I5  With EXACT_REFUSAL only: who is refused was refused by the file's own owner. NOT
 *       true of the rule: a sweeper, or another creator that clears up, holds the same lock
 *       for a moment. True with SWEEP_LOCK, a second lock on the file (another byte of it)
 *       under which the dead are removed, while the owner's lock is only tested: once free
 *       it stays free, because an owner takes it before the file has a name.
 */

#ifndef CREATORS
#define CREATORS 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define DEAD     (CREATORS + 1)
#define SWEEPER  (CREATORS + 2)
#define NOBODY   0
#define ABSENT   0

byte name = ABSENT;			/* inode that the name leads to */
byte lock[DEAD + 1];			/* holder of each inode's owner lock */
byte sweep_lock[DEAD + 1];		/* only with SWEEP_LOCK */
bool initialised[DEAD + 1];
bool lives[SWEEPER + 1];		/* ghost: this process was told that it owns the name */
byte num_owners;			/* ghost */

bool kill[SWEEPER + 1];
byte kills_left = KILLS;

#ifdef ONLY_OWNERS	/* look at I1 alone: not at the names, not at whoever attaches */
#define UNLINK(me) name = ABSENT
#else
#define UNLINK(me) \
	assert(name == ABSENT || name == me || !lives[name]); \
	name = ABSENT
#endif

#ifdef EXACT_REFUSAL
#define BY_ITS_OWNER assert(lock[found] == found)
#else
#define BY_ITS_OWNER skip
#endif

/* registry.sweep: open the name, and remove what it leads to if nobody owns that.
 * `found`: the inode; `is_running`: somebody owns it. */
inline remove_if_dead()
{
	is_running = false;
	found = name;			/* open(2), held open from here on */
	if
	:: found == ABSENT
	:: found != ABSENT ->
#ifdef NAIVE
		if			/* is anybody there? then remove it by name, unlocked */
		:: lock[found] != NOBODY -> is_running = true
		:: else -> atomic { UNLINK(me) }
		fi
#else
#ifdef SWEEP_LOCK
		if			/* F_OFD_GETLK */
		:: atomic { lock[found] != NOBODY ->
			is_running = true;
			BY_ITS_OWNER }
		:: lock[found] == NOBODY ->
			atomic { sweep_lock[found] == NOBODY -> sweep_lock[found] = me };
			if
			:: name == found -> atomic { UNLINK(me) }
			:: else
			fi;
			sweep_lock[found] = NOBODY
		fi
#else
		if			/* F_OFD_SETLK */
		:: atomic { lock[found] != NOBODY ->
			is_running = true;
			BY_ITS_OWNER }
		:: atomic { lock[found] == NOBODY -> lock[found] = me };
#ifdef UNLOCK_FIRST
			lock[found] = NOBODY;
#endif
#ifdef NO_INODE_CHECK
			atomic { UNLINK(me) };
#else
			if		/* stat the name, compare inodes */
			:: name == found -> atomic { UNLINK(me) }
			:: else
			fi;
#endif
#ifndef UNLOCK_FIRST
			lock[found] = NOBODY
#else
			skip
#endif
		fi
#endif
#endif
	fi;
	found = 0
}

/* The kernel closes what a dead process held. */
#define DIES_IF_KILLED unless { atomic { kill[me] -> release_all(); lives[me] = false } }

inline release_all()
{
	i = 1;
	do
	:: i <= DEAD ->
		if
		:: lock[i] == me -> lock[i] = NOBODY
		:: else
		fi;
		if
		:: sweep_lock[i] == me -> sweep_lock[i] = NOBODY
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0;
	if
	:: lives[me] -> num_owners--
	:: else
	fi
}

proctype creator(byte me)	/* `me` is also its file's inode */
{
	byte found, i;
	bool is_running;
	{
#ifdef NAIVE
		do
		:: atomic { name == ABSENT -> name = me; break }	/* O_CREAT | O_EXCL */
		:: name != ABSENT ->
			remove_if_dead();
			if
			:: is_running -> goto end
			:: else
			fi
		od;
		initialised[me] = true;
		if
		:: atomic { lock[me] == NOBODY -> lock[me] = me }
		:: lock[me] != NOBODY -> goto end
		fi;
		atomic { lives[me] = true; num_owners++; assert(num_owners <= 1) };
#else
#ifndef LOCK_LAST
		atomic { lock[me] == NOBODY -> lock[me] = me };
#endif
		/* SYNC POINT: segment initialised */
#ifndef INITIALISE_LAST
		initialised[me] = true;
#endif
		do
		:: atomic { name == ABSENT ->			/* linkat(2) */
			name = me;
#ifndef LOCK_LAST
owns:			lives[me] = true;
			num_owners++;
			assert(num_owners <= 1);
#endif
			break }
		:: name != ABSENT ->				/* EEXIST */
			remove_if_dead();
			if
			:: is_running -> lock[me] = NOBODY; goto end
			:: else
			fi
		od;
#ifdef LOCK_LAST
		if
		:: atomic { lock[me] == NOBODY -> lock[me] = me }
		:: lock[me] != NOBODY -> goto end
		fi;
		atomic { lives[me] = true; num_owners++; assert(num_owners <= 1) };
#endif
#ifdef INITIALISE_LAST
		initialised[me] = true;
#endif
#endif
		/* registry.withdraw: serves nobody any more, then unlinks while it still holds the lock */
		atomic { lives[me] = false; num_owners-- };
		if
		:: name == me -> atomic { UNLINK(me) }
		:: else
		fi;
		lock[me] = NOBODY;
end:		false
	} DIES_IF_KILLED
}

proctype sweeper(byte me)
{
	byte found, i;
	bool is_running;
	{
		remove_if_dead();
end:		false
	} DIES_IF_KILLED
}

proctype attacher()
{
	byte found;
	if
	:: atomic { name != ABSENT -> found = name };
attached:	assert(initialised[found])
	:: skip
	fi
}

proctype killer()
{
	byte who;
	do
	:: kills_left > 0 -> atomic {
		kills_left--;
		select(who : 1 .. SWEEPER);
		kill[who] = true;
		who = 0 }
	:: break
	od
}

init
{
	byte i = 1;
	atomic {
		initialised[DEAD] = true;
		if
		:: name = DEAD
		:: skip
		fi;
		do
		:: i <= CREATORS -> run creator(i); i++
		:: else -> break
		od;
		run sweeper(SWEEPER);
#ifndef ONLY_OWNERS
		run attacher();
#endif
		run killer()
	}
}
