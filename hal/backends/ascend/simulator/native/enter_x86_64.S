# Every slot jumps here with its number in eax: spill the argument registers and hand them on.
    .text
    .type sim_slot, @function
sim_slot:
    pushq %rbp
    movq %rsp, %rbp
    subq $112, %rsp
    movq %rdi, 0(%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movsd %xmm0, 48(%rsp)
    movsd %xmm1, 56(%rsp)
    movsd %xmm2, 64(%rsp)
    movsd %xmm3, 72(%rsp)
    movsd %xmm4, 80(%rsp)
    movsd %xmm5, 88(%rsp)
    movsd %xmm6, 96(%rsp)
    movsd %xmm7, 104(%rsp)
    movl %eax, %edi
    movq %rsp, %rsi
    leaq 48(%rsp), %rdx
    leaq 16(%rbp), %rcx
    call sim_enter@PLT
    leave
    ret

    .macro slot name, number
    .globl \name
    .type \name, @function
\name:
    movl $\number, %eax
    jmp sim_slot
    .endm
