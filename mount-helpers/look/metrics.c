/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metrics.c - `hitrainctl metrics`: the figures of a mount for monitoring, printed, as a file, or over HTTP.
 *
 * The server answers one request after the other, and gives each client two seconds. It changes nothing, and keeps
 * nothing of the mount open between requests.
 */
#include "mount-helpers/look/metrics.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mount-helpers/ctl/ctl.h"

enum { REQUEST_BYTES_MAX = 8192, CLIENT_MS = 2000, BACKLOG = 16 };

/* ---------------------------------------------------------------- text format */

struct family {
    char name[128], type[16]; /* of the last line # TYPE */
};

/* The name of the samples of a family, for which the text format wants # TYPE and # HELP. */
static const char *suffix_of(const struct family *f)
{
    return strcmp(f->type, "counter") == 0 ? "_total" : strcmp(f->type, "info") == 0 ? "_info" : "";
}

/* # TYPE, # HELP, # UNIT and # EOF: the last two are not known. */
static void put_comment(const char *line, struct family *f, struct ht_buf *out)
{
    char name[128];
    int n = 0;

    if (sscanf(line, "# TYPE %127s %15s", f->name, f->type) == 2)
        ht_buf_printf(out, "# TYPE %s%s %s\n", f->name, suffix_of(f),
                      strcmp(f->type, "counter") == 0 ? "counter" : "gauge");
    else if (sscanf(line, "# HELP %127s %n", name, &n) == 1 && n > 0)
        ht_buf_printf(out, "# HELP %s%s %s\n", name, strcmp(name, f->name) == 0 ? suffix_of(f) : "", line + n);
}

void ht_exposition_text(char *text, struct ht_buf *out)
{
    struct family f = {"", ""};
    char *save;

    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (line[0] == '#')
            put_comment(line, &f, out);
        else
            ht_buf_printf(out, "%s\n", line);
    }
}

/* -------------------------------------------------------------------- requests */

/* The header's value contains a word. Names of headers know no case. */
static bool header_has(const char *request, const char *name, const char *word)
{
    size_t len = strlen(name);

    for (const char *line = request; (line = strchr(line, '\n'));) {
        line++;
        if (strncasecmp(line, name, len) != 0)
            continue;
        const char *end = line + strcspn(line, "\r\n"), *at = strstr(line, word);
        if (at && at < end)
            return true;
    }
    return false;
}

enum ht_http_answer ht_http_parse(const char *request, bool *out_head)
{
    char method[16], target[256], version[16];

    *out_head = false;
    if (sscanf(request, "%15s %255s %15[^\r\n]", method, target, version) != 3 || strncmp(version, "HTTP/1.", 7) != 0)
        return HT_HTTP_BAD;
    *out_head = strcmp(method, "HEAD") == 0;
    if (!*out_head && strcmp(method, "GET") != 0)
        return HT_HTTP_METHOD;
    target[strcspn(target, "?")] = '\0';
    if (strcmp(target, "/") == 0)
        return HT_HTTP_INDEX;
    if (strcmp(target, "/metrics") != 0)
        return HT_HTTP_NONE;
    return header_has(request, "accept:", "application/openmetrics-text") ? HT_HTTP_OPENMETRICS : HT_HTTP_METRICS;
}

bool ht_http_address(const char *text, char host[64], char port[8])
{
    const char *colon = strrchr(text, ':');
    size_t len = colon ? (size_t)(colon - text) : 0;
    bool brackets = len >= 2 && text[0] == '[' && text[len - 1] == ']';

    if (!colon || len >= 64 || strlen(colon + 1) > 5 || colon[1] == '\0' ||
        colon[1 + strspn(colon + 1, "0123456789")] != '\0' || strtoul(colon + 1, NULL, 10) > UINT16_MAX)
        return false;
    if (!brackets && memchr(text, ':', len))
        return false;
    snprintf(port, 8, "%s", colon + 1);
    if (len == 0)
        strcpy(host, "127.0.0.1");
    else
        snprintf(host, 64, "%.*s", (int)(brackets ? len - 2 : len), text + brackets);
    return true;
}

/* --------------------------------------------------------------------- sources */

/* The metrics of the mount at point, in the text format or as OpenMetrics; free out. */
static int read_metrics(const char *point, bool open_metrics, struct ht_buf *out)
{
    char *text;
    int rc = ht_hidden_text(point, "stats", &text);

    if (rc < 0)
        return rc;
    if (open_metrics)
        ht_buf_put(out, text, strlen(text));
    else
        ht_exposition_text(text, out);
    free(text);
    return out->err;
}

/* ------------------------------------------------------------------------ text */

/* Makes or replaces a file. Its readers see the old content or the new one, whole. */
static int replace_file(const char *path, const void *data, size_t len)
{
    char name[PATH_MAX];

    if (snprintf(name, sizeof(name), "%s.XXXXXX", path) >= (int)sizeof(name))
        return -ENAMETOOLONG;
    int fd = mkostemp(name, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = ht_write_all(fd, data, len);
    if (rc == 0 && fchmod(fd, 0644) != 0)
        rc = -errno;
    if (close(fd) != 0 && rc == 0)
        rc = -errno;
    if (rc == 0 && rename(name, path) != 0)
        rc = -errno;
    if (rc < 0)
        unlink(name);
    return rc;
}

static int put_once(const char *point, const struct ht_cmd_options *o)
{
    struct ht_buf text = HT_BUF_INIT;
    int rc = read_metrics(point, !o->textfile, &text);

    if (rc < 0) {
        ht_cmd_explain(point, rc);
    } else if (o->textfile) {
        rc = replace_file(o->textfile, text.data, text.len);
        if (rc < 0)
            ht_error("%s: cannot be written: %s", o->textfile, strerror(-rc));
    } else {
        rc = ht_write_all(STDOUT_FILENO, text.data, text.len);
    }
    ht_buf_free(&text);
    return rc;
}

/* ------------------------------------------------------------------------ HTTP */

static int listen_on(const char *host, const char *port)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found;
    int fd = -1, err = EADDRNOTAVAIL, on = 1;

    if (getaddrinfo(host, port, &hints, &found) != 0)
        return -EADDRNOTAVAIL;
    for (const struct addrinfo *a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
            bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
            err = errno;
            if (fd >= 0)
                close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(found);
    return fd < 0 ? -err : fd;
}

/* The port that the kernel chose for 0. */
static unsigned port_of(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } a = {0};
    socklen_t len = sizeof(a);

    if (getsockname(fd, &a.any, &len) != 0)
        return 0;
    return ntohs(a.any.sa_family == AF_INET6 ? a.six.sin6_port : a.four.sin_port);
}

/* Reads up to the empty line. False: it does not come in time, or is too long. */
static bool read_head(int fd, char head[REQUEST_BYTES_MAX])
{
    uint64_t end_ns = ht_now_ns() + CLIENT_MS * UINT64_C(1000000);
    size_t len = 0;

    while (len + 1 < REQUEST_BYTES_MAX && ht_now_ns() < end_ns) {
        ssize_t n = recv(fd, head + len, REQUEST_BYTES_MAX - 1 - len, 0);
        if (n <= 0)
            return false;
        len += (size_t)n;
        head[len] = '\0';
        if (strstr(head, "\r\n\r\n") || strstr(head, "\n\n"))
            return true;
    }
    return false;
}

static void send_answer(int fd, const char *status, const char *type, bool head, const void *body, size_t len)
{
    uint64_t end_ns = ht_now_ns() + CLIENT_MS * UINT64_C(1000000);
    char text[512];
    int n = snprintf(text, sizeof(text),
                     "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n"
                     "X-Content-Type-Options: nosniff\r\n%s\r\n",
                     status, type, len, strncmp(status, "405", 3) == 0 ? "Allow: GET, HEAD\r\n" : "");

    if (send(fd, text, (size_t)n, MSG_NOSIGNAL) != n)
        return;
    for (const char *at = body; !head && len > 0;) {
        ssize_t done = send(fd, at, len, MSG_NOSIGNAL);
        if (done <= 0 || ht_now_ns() > end_ns) /* a client that reads slowly holds up the others */
            return;
        at += done;
        len -= (size_t)done;
    }
}

static void answer_metrics(int fd, const char *point, bool open_metrics, bool head)
{
    struct ht_buf text = HT_BUF_INIT;
    int rc = read_metrics(point, open_metrics, &text);

    if (rc < 0) {
        ht_buf_reset(&text);
        ht_buf_printf(&text, "%s: %s\n", point, strerror(-rc));
        send_answer(fd, "503 Service Unavailable", "text/plain; charset=utf-8", head, text.data, text.len);
    } else {
        send_answer(fd, "200 OK",
                    open_metrics ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                                 : "text/plain; version=0.0.4; charset=utf-8",
                    head, text.data, text.len);
    }
    ht_buf_free(&text);
}

static void serve_one(int fd, const char *point)
{
    static const char index[] = "<!DOCTYPE html><title>hitrain</title><a href=\"/metrics\">metrics</a>\n";
    static const char html[] = "text/html; charset=utf-8", plain[] = "text/plain; charset=utf-8";
    const struct timeval patience = {.tv_sec = CLIENT_MS / 1000};
    char head[REQUEST_BYTES_MAX];
    bool is_head;

    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    if (!read_head(fd, head))
        return;
    enum ht_http_answer wanted = ht_http_parse(head, &is_head);
    if (wanted == HT_HTTP_METRICS || wanted == HT_HTTP_OPENMETRICS)
        answer_metrics(fd, point, wanted == HT_HTTP_OPENMETRICS, is_head);
    else if (wanted == HT_HTTP_INDEX)
        send_answer(fd, "200 OK", html, is_head, index, strlen(index));
    else if (wanted == HT_HTTP_METHOD)
        send_answer(fd, "405 Method Not Allowed", plain, false, "", 0);
    else if (wanted == HT_HTTP_NONE)
        send_answer(fd, "404 Not Found", plain, is_head, "", 0);
    else
        send_answer(fd, "400 Bad Request", plain, false, "", 0);
}

static int serve_metrics(const char *point, const char *listen_at)
{
    char host[64], port[8];

    if (!ht_http_address(listen_at, host, port))
        return ht_fail(HT_CMD_USAGE, "--listen: not an address and a port, as in 127.0.0.1:9469: %s", listen_at);
    int fd = listen_on(host, port);
    if (fd < 0)
        return ht_fail(HT_CMD_FAILED, "cannot listen on %s: %s%s", listen_at, strerror(-fd),
                       fd == -EADDRINUSE ? "; choose another port, or end the program that has this one" : "");
    ht_info("metrics of %s: http://%s%s%s:%u/metrics", point, strchr(host, ':') ? "[" : "", host,
            strchr(host, ':') ? "]" : "", port_of(fd));
    for (;;) {
        int client = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0) {
            ht_sleep_ns(100000000); /* no descriptors, or the client left */
            continue;
        }
        serve_one(client, point);
        close(client);
    }
}

int ht_cmd_metrics(const char *path, const struct ht_cmd_options *o)
{
    if (o->listen)
        return serve_metrics(o->point, o->listen);
    while (put_once(o->point, o) >= 0) {
        if (o->watch_s <= 0)
            return HT_CMD_OK;
        ht_sleep_ns((uint64_t)(o->watch_s * 1e9));
    }
    return HT_CMD_FAILED;
}
