/* SPDX-License-Identifier: Apache-2.0 */
/* list.h - intrusive lists, doubly linked, and chains with one link. Not locked: the owner's lock guards them. */
#pragma once

#include <stdbool.h>
#include "tiering/base/base.h"

struct ht_list {
    struct ht_list *prev, *next;
};

static inline void ht_list_init(struct ht_list *l)
{
    l->prev = l->next = l;
}

static inline bool ht_list_empty(const struct ht_list *l)
{
    return l->next == l;
}

static inline void ht_list_add_tail(struct ht_list *head, struct ht_list *n)
{
    n->prev = head->prev;
    n->next = head;
    head->prev->next = n;
    head->prev = n;
}

/* Unlink; afterwards n is an empty list, so that removing twice is harmless. */
static inline void ht_list_del(struct ht_list *n)
{
    n->prev->next = n->next;
    n->next->prev = n->prev;
    ht_list_init(n);
}

#define ht_list_entry(p, type, member) ht_container_of(p, type, member)
#define ht_list_for_each(pos, head) for (struct ht_list *pos = (head)->next; pos != (head); pos = pos->next)
/* The same over what has member in the list: p is a pointer to one. */
#define ht_list_for_each_entry(p, head, type, member)                               \
    for (type *p = ht_list_entry((head)->next, type, member); &p->member != (head); \
         p = ht_list_entry(p->member.next, type, member))
/* Allows removal of the current element. */
#define ht_list_for_each_entry_safe(p, head, type, member)                                                             \
    for (type *p = ht_list_entry((head)->next, type, member), *p##_next = ht_list_entry(p->member.next, type, member); \
         &p->member != (head); p = p##_next, p##_next = ht_list_entry(p->member.next, type, member))
/* Allows removal of the current element. */
#define ht_list_for_each_safe(pos, tmp, head) \
    for (struct ht_list *pos = (head)->next, *tmp = pos->next; pos != (head); pos = tmp, tmp = pos->next)

/* An entry comes first in a chain, which has one link. next: the field of entries that links them. */
#define ht_chain_link(head, entry, next) \
    do {                                 \
        (entry)->next = *(head);         \
        *(head) = (entry);               \
    } while (0)
/* It leaves the chain that has it. */
#define ht_chain_remove(head, entry, next)   \
    do {                                     \
        __typeof__(entry) before_ = *(head); \
        if (before_ == (entry)) {            \
            *(head) = before_->next;         \
        } else {                             \
            while (before_->next != (entry)) \
                before_ = before_->next;     \
            before_->next = (entry)->next;   \
        }                                    \
    } while (0)
