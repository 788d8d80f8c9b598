/* SPDX-License-Identifier: Apache-2.0 */
/* all.h - the list of rules and of their kernels: (number in enum ht_kernel, step function, states it keeps). */
#pragma once

#include "optim/rules/adagrad.h"
#include "optim/rules/adam.h"
#include "optim/rules/adamw.h"
#include "optim/rules/lion.h"
#include "optim/rules/muon.h"
#include "optim/rules/sgd.h"

#define HT_RULES(X) X(adamw) X(adam) X(sgd) X(lion) X(adagrad) X(muon)

#define HT_KERNELS(X)                          \
    X(HT_KERNEL_ADAMW, adamw, 2)               \
    X(HT_KERNEL_ADAM, adam, 2)                 \
    X(HT_KERNEL_SGD, sgd, 0)                   \
    X(HT_KERNEL_SGD_MOMENTUM, sgd_momentum, 1) \
    X(HT_KERNEL_SGD_NESTEROV, sgd_nesterov, 1) \
    X(HT_KERNEL_LION, lion, 1)                 \
    X(HT_KERNEL_ADAGRAD, adagrad, 1)           \
    X(HT_KERNEL_ADAMW_NEAR_G, adamw_near_g, 2) \
    X(HT_KERNEL_ADAM_NEAR_G, adam_near_g, 2)   \
    X(HT_KERNEL_MUON, muon, 0)
