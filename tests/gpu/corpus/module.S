/* The fatbin in .rodata, where no compiler registers it. */
    .section .rodata
    .balign 16
    .globl module_image
    .hidden module_image
module_image:
    .incbin "module.fatbin"
    .section .note.GNU-stack,"",@progbits
