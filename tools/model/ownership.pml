/*
 * One name in /dev/shm: owners that start, stop and die, a sweeper, and a process that attaches.
 * shmllm/ipc/segment.py: create, take_ownership; registry.py: publish, sweep, withdraw, attach
 *
 * Kernel objects: one directory entry, and inodes with a lock each. Inode k is the file of
 * creator k; the kernel does not reuse its number while a process holds it open. At the start the
 * name may lead to inode DEAD, the file of an owner that was killed.
 * The kernel frees the locks of a process that dies. Each system call is one step. Loads and
 * stores need no buffers here, because the system calls between them order them.
 *
 * Creation: create an unnamed file, lock it, initialise it, link it if the name is absent. If the
 * name exists: open it and try its lock. If the lock is refused, the name has a live owner. If it
 * is granted, the owner is dead: if the name still leads to this inode, unlink it while holding the
 * lock, and then try again. A sweep is the same without the link. An owner that stops unlinks its
 * name and then gives up its lock.
 *
 * Invariants
 *   I1  Two live owners of the name never exist (at `owns`).
 *   I2  No other process removes the name of a live owner (at each unlink).
 *   I3  A process that opens the name finds an initialised segment (`attached`).
 *   I4  Every process ends (spin's invalid end states).
 *   I5  With EXACT_REFUSAL only: the owner of the file holds a refused lock. This does NOT hold
 *       for the rule above, because a sweeper, or another creator that removes a dead name, holds
 *       the same lock for a short time. It holds with SWEEP_LOCK, a second lock on the file
 *       (another byte of it), under which a process removes a dead name, while it only tests the
 *       owner's lock. That lock stays free once it is free, because an owner takes it before the
 *       file has a name.
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

#ifdef ONLY_OWNERS	/* check I1 alone: neither the names nor the process that attaches */
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

/* registry.sweep: open the name, and remove it if its file has no owner.
 * `found`: the inode; `is_running`: the file has an owner. */
inline remove_if_dead()
{
	is_running = false;
	found = name;			/* open(2), held open from here on */
	if
	:: found == ABSENT
	:: found != ABSENT ->
#ifdef NAIVE
		if			/* if nobody holds the lock, remove the name without a lock */
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

/* The kernel closes the files of a dead process, which frees its locks. */
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
		/* registry.withdraw: stops serving, then unlinks while it still holds the lock */
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
