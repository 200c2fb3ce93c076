"""The machine code of the SIGBUS handler that `bus_guard` installs, for each kind of machine.

Each entry of HANDLERS is an assembly text and the bytes that an assembler makes of it; a test
assembles the texts again and compares. The handler is machine code because a Python function
cannot do its work: a thread without the GIL would wait for it, possibly for ever, and a signal
that hits a thread inside the memory allocator would end in a deadlock instead of a crash. The
handler calls nothing but the kernel, takes no lock and allocates nothing, so it works on every
thread and at every instruction.

What it does, with TABLE as its only memory:

    if the kernel reports an access behind a file (BUS_ADRERR):
        for each entry of the table:
            if the address lies in [begin, begin + size):
                map zeros over all of it; store 1 into `lost`; return
    restore the previous action, send this thread the signal again, return

The table begins TABLE_OFFSET bytes behind the code:

    +--------+-------------------------------+
    | offset | field                         |
    +--------+-------------------------------+
    | 0      | previous action, 32 bytes, as |
    |        | rt_sigaction(2) returns it    |
    | 32     | entry 0: begin, size, lost    |
    | 56     | entry 1 ...                   |
    +--------+-------------------------------+
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE_OFFSET = 0x10000
"""A multiple of the largest page size, so code and table can have different protections."""
ACTION_BYTES = 32
NUM_ENTRIES = 128
WORDS_PER_ENTRY = 3


@dataclass(frozen=True, slots=True)
class Handler:
    """
    Attributes:
        sigaction: the number of the system call rt_sigaction.
        assembly: the source text, in the syntax of LLVM and GNU.
        code: the bytes that this text makes.
    """

    sigaction: int
    assembly: str
    code: bytes


_X86_64 = """
    .intel_syntax noprefix
handler:                                # edi: number, rsi: siginfo_t, rdx: context
    cmp  dword ptr [rsi + 8], 2         # si_code: BUS_ADRERR
    jne  previous
    mov  r12, [rsi + 16]                # si_addr
    lea  rbx, [rip + handler + 0x10020] # entry 0
    lea  r13, [rbx + 3072]              # 128 entries of 24 bytes
next:
    mov  rdi, [rbx]                     # begin
    mov  rsi, [rbx + 8]                 # size
    mov  rax, r12
    sub  rax, rdi
    cmp  rax, rsi
    jb   ours
    add  rbx, 24
    cmp  rbx, r13
    jb   next
previous:
    mov  edi, 7                         # SIGBUS
    lea  rsi, [rip + handler + 0x10000] # the previous action
    xor  edx, edx
    mov  r10d, 8                        # bytes of a signal set
    mov  eax, 13                        # rt_sigaction
    syscall
    mov  eax, 39                        # getpid
    syscall
    mov  edi, eax
    mov  eax, 186                       # gettid
    syscall
    mov  esi, eax
    mov  edx, 7                         # SIGBUS
    mov  eax, 234                       # tgkill: pending until this handler returns
    syscall
    ret
ours:
    mov  edx, 3                         # PROT_READ | PROT_WRITE
    mov  r10d, 0x4032                   # MAP_PRIVATE | FIXED | ANONYMOUS | NORESERVE
    mov  r8, -1
    xor  r9d, r9d
    mov  eax, 9                         # mmap
    syscall
    cmp  rax, rdi
    jne  previous
    mov  qword ptr [rbx + 16], 1        # lost
    ret
"""

_AARCH64 = """
handler:                                // w0: number, x1: siginfo_t, x2: context
    ldr  w3, [x1, 8]                    // si_code
    cmp  w3, 2                          // BUS_ADRERR
    b.ne previous
    ldr  x12, [x1, 16]                  // si_addr
    adr  x11, handler + 0x10020         // entry 0
    add  x13, x11, 3072                 // 128 entries of 24 bytes
next:
    ldp  x0, x1, [x11]                  // begin, size
    sub  x3, x12, x0
    cmp  x3, x1
    b.lo ours
    add  x11, x11, 24
    cmp  x11, x13
    b.lo next
previous:
    mov  x0, 7                          // SIGBUS
    adr  x1, handler + 0x10000          // the previous action
    mov  x2, 0
    mov  x3, 8                          // bytes of a signal set
    mov  x8, 134                        // rt_sigaction
    svc  0
    mov  x8, 172                        // getpid
    svc  0
    mov  x9, x0
    mov  x8, 178                        // gettid
    svc  0
    mov  x1, x0
    mov  x0, x9
    mov  x2, 7                          // SIGBUS
    mov  x8, 131                        // tgkill: pending until this handler returns
    svc  0
    ret
ours:
    mov  x9, x0
    mov  x2, 3                          // PROT_READ | PROT_WRITE
    mov  x3, 0x4032                     // MAP_PRIVATE | FIXED | ANONYMOUS | NORESERVE
    mov  x4, -1
    mov  x5, 0
    mov  x8, 222                        // mmap
    svc  0
    cmp  x0, x9
    b.ne previous
    mov  x3, 1
    str  x3, [x11, 16]                  // lost
    ret
"""

HANDLERS = {
    "x86_64": Handler(
        13,
        _X86_64,
        bytes.fromhex(
            "837e0802752d4c8b6610488d1d0f0001004c8dab000c0000488b3b488b73084c89e04829f84839f0"
            "72434883c3184c39eb72e5bf07000000488d35c1ff000031d241ba08000000b80d0000000f05b827"
            "0000000f0589c7b8ba0000000f0589c6ba07000000b8ea0000000f05c3ba0300000041ba32400000"
            "49c7c0ffffffff4531c9b8090000000f054839f875a548c7431001000000c3"
        ),
    ),
    "aarch64": Handler(
        134,
        _AARCH64,
        bytes.fromhex(
            "230840b97f080071610100542c0840f98b0008106d013091600540a9830100cb7f0001eba3020054"
            "6b6100917f010deb43ffff54e00080d241fe0710020080d2030180d2c81080d2010000d4881580d2"
            "010000d4e90300aa481680d2010000d4e10300aae00309aae20080d2681080d2010000d4c0035fd6"
            "e90300aa620080d2430688d204008092050080d2c81b80d2010000d41f0009ebe1fcff54230080d2"
            "630900f9c0035fd6"
        ),
    ),
}
"""The handlers, by `platform.machine()`."""
