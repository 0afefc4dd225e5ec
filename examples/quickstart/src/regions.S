// Embeds each fatbin the way nvcc does: the code in .nv_fatbin, and in .nvFatBinSegment a wrapper
// (magic, version, address of the code, unused) whose address the driver is given.

.macro region name
    .section .nv_fatbin, "a", @progbits
    .balign 8
\name\()_fatbin:
    .incbin "\name\().fatbin"
    .section .nvFatBinSegment, "aw", @progbits
    .balign 8
    .globl \name\()_wrapper
    .hidden \name\()_wrapper
\name\()_wrapper:
    .long 0x466243b1, 1
    .quad \name\()_fatbin, 0
.endm

region vectors
region matrices
region statistics
region images
region signals
region fourier
region sorting

.section .note.GNU-stack, "", @progbits
