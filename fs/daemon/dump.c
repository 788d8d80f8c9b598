/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A dump cannot come through the mount, which may answer nothing. So it comes through a socket in the abstract
 * namespace, which needs no directory and leaves nothing after a crash. The mount's device number names it: hitrainctl
 * reads that number in the table of mounts, without a request to the mount. The thread takes no lock of the daemon but
 * through dump.h of tiering/base, which waits for a bounded time.
 *
 * Any program of the network namespace may hold that name: the daemon of an earlier mount that still ends, or an
 * attacker's. The thread then tries again each second, and hitrainctl asks for the owner of the socket that answers.
 */
#include "fs/daemon/daemon_priv.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tiering/base/dump.h"
#include "tiering/base/log.h"
#include "tiering/sys/mounts.h"
#include <hitrain/version.h>

enum {
    SEND_MS = 60000, /* that a client may take for a piece of the text */
    BIND_MS = 1000,  /* until it tries again to take the name */
    PAUSE_MS = 100,  /* after a client that it could not accept */
};

static struct {
    const struct ht_daemon *daemon;
    uint64_t began_ns;
    struct sockaddr_un address;
    socklen_t address_len;
    pthread_t thread;
    int socket, stop;         /* descriptors; socket: -1 while another program has its name */
    bool running, name_taken; /* name_taken: a message has said so */
} the;

static void put_paths(struct ht_dump *d)
{
    ht_dump_put(d, "paths:\n");
    for (unsigned i = 0; i < d->ids; i++)
        if (!ht_ns_dump_path(ht_ctl_parts(the.daemon->ctl).ns, d, d->id[i]))
            return;
}

static void put_all(struct ht_dump *d)
{
    ht_dump_put(d, "hitrain %s, process %d: ", HT_VERSION, (int)getpid());
    ht_dump_name(d, the.daemon->source);
    ht_dump_put(d, " on ");
    ht_dump_name(d, the.daemon->mountpoint);
    ht_dump_put(d, ", mounted for ");
    ht_dump_age(d, the.began_ns);
    ht_dump_put(d, "\n");
    ht_dump_threads(d);
    ht_fuse_dump(the.daemon->fuse, d);
    ht_optim_dump(ht_ctl_parts(the.daemon->ctl).optim, d);
    ht_store_dump(ht_ctl_parts(the.daemon->ctl).store, d);
    put_paths(d);
    ht_dump_put(d, HT_DUMP_END "\n");
}

static bool is_root(int client)
{
    struct ucred peer;
    socklen_t len = sizeof(peer);

    return getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 && peer.uid == 0;
}

/* False: it takes nothing more, or the server ends. */
static bool may_send(int client)
{
    struct pollfd fds[] = {{.fd = the.stop, .events = POLLIN}, {.fd = client, .events = POLLOUT}};

    return poll(fds, HT_ARRAY_SIZE(fds), SEND_MS) > 0 && !fds[0].revents;
}

static void send_all(int client, const struct ht_buf *text)
{
    ssize_t n = 0;

    for (size_t at = 0; at < text->len && n >= 0 && may_send(client); at += (size_t)n)
        n = send(client, text->data + at, text->len - at, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void answer_client(int client)
{
    static struct ht_dump d; /* of this thread */

    if (is_root(client))
        put_all(&d);
    send_all(client, &d.text);
    ht_buf_free(&d.text);
    d = (struct ht_dump){.ids = 0};
}

/* Waits after an error, which may be a lack of descriptors or of memory that lasts. */
static void accept_client(void)
{
    struct pollfd stop = {.fd = the.stop, .events = POLLIN};
    int client = accept4(the.socket, NULL, NULL, SOCK_CLOEXEC);

    if (client < 0) {
        poll(&stop, 1, PAUSE_MS);
        return;
    }
    answer_client(client);
    close(client);
}

/* Returns 0, also if another program has the name. */
static int open_socket(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), rc = 0;

    if (fd < 0)
        return -errno;
    if (bind(fd, (const struct sockaddr *)&the.address, the.address_len) != 0 || listen(fd, 4) != 0)
        rc = -errno;
    if (rc == 0)
        the.socket = fd;
    else
        close(fd);
    return rc == -EADDRINUSE ? 0 : rc;
}

static void open_again(void)
{
    (void)open_socket();
    if (the.socket < 0 && !the.name_taken)
        ht_warn("%s: hitrainctl dump finds no answer: another program has taken the name of its socket",
                the.daemon->mountpoint);
    the.name_taken = the.socket < 0;
}

static void *serve_clients(void *arg)
{
    struct pollfd fds[] = {{.fd = the.stop, .events = POLLIN}, {.events = POLLIN}};

    pthread_setname_np(pthread_self(), "ht-dump");
    while (!fds[0].revents) {
        fds[1].fd = the.socket;
        int n = poll(fds, HT_ARRAY_SIZE(fds), the.socket < 0 ? BIND_MS : -1);
        if (n == 0)
            open_again();
        else if (n > 0 && fds[1].revents)
            accept_client();
    }
    return NULL;
}

static int find_address(void)
{
    struct ht_mount_entry m;
    int rc = ht_mount_at(the.daemon->mountpoint, &m);

    if (rc)
        return rc;
    the.address.sun_family = AF_UNIX;
    int n = snprintf(the.address.sun_path + 1, sizeof(the.address.sun_path) - 1, HT_DUMP_SOCKET, m.major, m.minor);
    the.address_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return 0;
}

static int start_server(void)
{
    int rc = find_address();

    if (rc == 0)
        rc = open_socket();
    if (rc)
        return rc;
    the.stop = eventfd(0, EFD_CLOEXEC);
    return the.stop < 0 ? -errno : -pthread_create(&the.thread, NULL, serve_clients, NULL);
}

static void close_all(void)
{
    if (the.socket >= 0)
        close(the.socket);
    if (the.stop >= 0)
        close(the.stop);
}

void ht_dump_server_begin(const struct ht_daemon *d)
{
    the.daemon = d;
    the.began_ns = ht_now_ns();
    the.socket = the.stop = -1;
    int rc = start_server();
    the.running = rc == 0;
    if (rc) {
        close_all();
        ht_warn("%s: hitrainctl dump will find no answer: %s", d->mountpoint, strerror(-rc));
    }
}

void ht_dump_server_end(void)
{
    if (!the.running)
        return;
    if (eventfd_write(the.stop, 1) == 0)
        pthread_join(the.thread, NULL);
    close_all();
    the.running = false;
}
