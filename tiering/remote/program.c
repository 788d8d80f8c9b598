/* SPDX-License-Identifier: Apache-2.0 */
/* program.c - see program.h. mount-helpers/vault/wire.py describes the packets. */
#include "tiering/remote/program.h"
#include "tiering/base/buf.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    REQUEST_BYTES = 32,
    ANSWER_BYTES = 16,
    KEY_BYTES_MAX = 64,
    VERB_GET = 3,
    /* In the child. Here both lie above, so that neither takes the other's number. */
    CHILD_SOCKET = 3,
    CHILD_MEMORY = 4,
    DESCRIPTOR_MIN = 16,
};

static int make_memory(struct ht_remote_program *p, size_t bytes)
{
    int first = memfd_create("hitrain-vault", MFD_CLOEXEC | MFD_ALLOW_SEALING), fd, rc = 0;

    if (first < 0)
        return -errno;
    fd = fcntl(first, F_DUPFD_CLOEXEC, DESCRIPTOR_MIN);
    close(first);
    if (fd < 0)
        return -errno;
    if (ftruncate(fd, (off_t)bytes) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        rc = -errno;
    void *memory = rc ? MAP_FAILED : mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        rc = rc ? rc : -errno;
        close(fd);
        return rc;
    }
    p->memory = memory;
    p->memory_bytes = bytes;
    return fd;
}

/* ends[0] stays here. */
static int make_socket(int ends[2])
{
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return -errno;
    ends[0] = pair[0];
    ends[1] = fcntl(pair[1], F_DUPFD_CLOEXEC, DESCRIPTOR_MIN);
    int rc = ends[1] < 0 ? -errno : 0;
    close(pair[1]);
    if (rc)
        close(pair[0]);
    return rc;
}

/* A session of its own: signals of a terminal are not for it. It has the signals of a new program. */
static int spawn(pid_t *out_pid, const char *path, const char *const words[], int socket, int memory)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none, all;

    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    int rc = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    rc = rc ? rc : posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    rc = rc ? rc : posix_spawn_file_actions_adddup2(&actions, socket, CHILD_SOCKET);
    rc = rc ? rc : posix_spawn_file_actions_adddup2(&actions, memory, CHILD_MEMORY);
    rc = rc ? rc : posix_spawn_file_actions_addclosefrom_np(&actions, CHILD_MEMORY + 1);
    rc = rc ? rc : posix_spawnattr_setsigmask(&attributes, &none);
    rc = rc ? rc : posix_spawnattr_setsigdefault(&attributes, &all);
    rc = rc
        ? rc
        : posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    rc = rc ? rc : posix_spawn(out_pid, path, &actions, &attributes, (char *const *)words, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return -rc;
}

int ht_remote_program_start(struct ht_remote_program *p, const char *path, const char *url, uint32_t slots,
                            uint32_t slot_bytes)
{
    char slots_text[16], bytes_text[16];
    /* CHILD_SOCKET and CHILD_MEMORY */
    const char *const words[] = {path, url, "3", "4", slots_text, bytes_text, NULL};
    struct ht_remote_program made = {0};
    int ends[2] = {-1, -1}, memory, rc;

    snprintf(slots_text, sizeof(slots_text), "%u", slots);
    snprintf(bytes_text, sizeof(bytes_text), "%u", slot_bytes);
    memory = make_memory(&made, (size_t)slots * slot_bytes);
    if (memory < 0)
        return memory;
    rc = make_socket(ends);
    if (!rc) {
        made.socket = ends[0];
        rc = spawn(&made.pid, path, words, ends[1], memory);
        close(ends[1]);
        if (rc)
            close(ends[0]);
    }
    close(memory);
    if (rc) {
        munmap(made.memory, made.memory_bytes);
        return rc;
    }
    *p = made;
    return 0;
}

int ht_remote_program_ask(const struct ht_remote_program *p, uint32_t number, uint32_t slot, uint64_t left_ms,
                          const char *key, uint64_t offset, uint64_t bytes)
{
    uint8_t packet[REQUEST_BYTES + KEY_BYTES_MAX];
    size_t key_bytes = strnlen(key, KEY_BYTES_MAX);

    ht_le32_store(packet, number);
    ht_le32_store(packet + 4, VERB_GET | (uint32_t)key_bytes << 16);
    ht_le32_store(packet + 8, slot);
    ht_le32_store(packet + 12, (uint32_t)ht_min_u64(left_ms, UINT32_MAX));
    ht_le64_store(packet + 16, offset);
    ht_le64_store(packet + 24, bytes);
    memcpy(packet + REQUEST_BYTES, key, key_bytes);
    ssize_t rc = send(p->socket, packet, REQUEST_BYTES + key_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    return rc < 0 ? -errno : 0;
}

int ht_remote_program_answer(const struct ht_remote_program *p, struct ht_remote_answer *out_answer)
{
    uint8_t packet[ANSWER_BYTES + HT_REMOTE_TEXT_BYTES];
    ssize_t len = recv(p->socket, packet, sizeof(packet), MSG_DONTWAIT | MSG_TRUNC);

    if (len < 0)
        return errno == EAGAIN || errno == EINTR ? -EAGAIN : -EPIPE;
    if (len == 0)
        return -EPIPE;
    if (len < ANSWER_BYTES || (size_t)len > sizeof(packet))
        return -EPROTO;
    uint32_t result = ht_le32_load(packet + 4); /* with the flags, which a get does not have */
    if (result == 1 || result >= HT_REMOTE_RESULTS)
        return -EPROTO;
    out_answer->number = ht_le32_load(packet);
    out_answer->result = (enum ht_remote_result)result;
    out_answer->bytes = ht_le64_load(packet + 8);
    size_t text_bytes = (size_t)len - ANSWER_BYTES;
    for (size_t i = 0; i < text_bytes; i++) {
        uint8_t c = packet[ANSWER_BYTES + i];
        out_answer->text[i] = c < ' ' || c > '~' ? '?' : (char)c;
    }
    out_answer->text[text_bytes] = 0;
    return 0;
}

void ht_remote_program_leave(struct ht_remote_program *p)
{
    close(p->socket);
    munmap(p->memory, p->memory_bytes);
    *p = (struct ht_remote_program){0};
}

bool ht_remote_program_reap(pid_t pid)
{
    pid_t rc = waitpid(pid, NULL, WNOHANG);

    return rc == pid || (rc < 0 && errno == ECHILD);
}
