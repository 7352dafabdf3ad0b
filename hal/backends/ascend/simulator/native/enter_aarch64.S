// Every slot branches here with its number in w16: spill the argument registers and hand them on.
    .text
    .type sim_slot, %function
sim_slot:
    stp x29, x30, [sp, #-144]!
    mov x29, sp
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    stp d0, d1, [sp, #80]
    stp d2, d3, [sp, #96]
    stp d4, d5, [sp, #112]
    stp d6, d7, [sp, #128]
    mov w0, w16
    add x1, sp, #16
    add x2, sp, #80
    add x3, sp, #144
    bl sim_enter
    ldp x29, x30, [sp], #144
    ret

    .macro slot name, number
    .globl \name
    .type \name, %function
\name:
    mov w16, #\number
    b sim_slot
    .endm
