/* SPDX-License-Identifier: Apache-2.0 */
/*
 * all.h - the list of rules and of their kernels: (number in enum ht_kernel, step function, states that it updates,
 * kinds of state that its rule keeps beside the master, in the order of ht_update.state).
 */
#pragma once

#include "optim/rules/adagrad.h"
#include "optim/rules/adam.h"
#include "optim/rules/lion.h"
#include "optim/rules/muon.h"
#include "optim/rules/sgd.h"

#define HT_RULES(X) X(adamw) X(adam) X(sgd) X(lion) X(adagrad) X(muon)

#define HT_KERNELS(X)                                                                 \
    X(HT_KERNEL_ADAMW, adamw, 2, HT_STATE_EXP_AVG, HT_STATE_EXP_AVG_SQ)               \
    X(HT_KERNEL_ADAM, adam, 2, HT_STATE_EXP_AVG, HT_STATE_EXP_AVG_SQ)                 \
    X(HT_KERNEL_SGD, sgd, 0, 0)                                                       \
    X(HT_KERNEL_SGD_MOMENTUM, sgd_momentum, 1, HT_STATE_MOMENTUM_BUFFER)              \
    X(HT_KERNEL_SGD_NESTEROV, sgd_nesterov, 1, HT_STATE_MOMENTUM_BUFFER)              \
    X(HT_KERNEL_LION, lion, 1, HT_STATE_EXP_AVG)                                      \
    X(HT_KERNEL_ADAGRAD, adagrad, 1, HT_STATE_SUM)                                    \
    X(HT_KERNEL_ADAMW_NEAR_G, adamw_near_g, 2, HT_STATE_EXP_AVG, HT_STATE_EXP_AVG_SQ) \
    X(HT_KERNEL_ADAM_NEAR_G, adam_near_g, 2, HT_STATE_EXP_AVG, HT_STATE_EXP_AVG_SQ)   \
    X(HT_KERNEL_MUON, muon, 0, HT_STATE_MOMENTUM_BUFFER)
