"""What it costs the ranks to agree in every step, over a network in which each message takes 5 ms.

Each step of training sums the gradient norm over the ranks. The flags of `clip_train.task.Flags` (a stop without
data, a stop, a full memory, a smaller micro-batch) are summed with it, as one number. Until November 2026 the ranks
voted by a collective of their own.

Ranks are threads of this process, each with its own gloo group over loopback, so that 64 of them fit on two cores. A
preloaded library (below, in C) delays each message, as a network with one rank per node would. Each round measures, in
turn: the sum of the norm alone, the same with the flags, and the norm followed by a vote.

The cost of a vote grows with 2 (W - 1) messages in a row. The flags must cost less than a tenth of it.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from common import finish, parser

NORMS = 3  # squares of the image tower, the text tower, and the scalars
FLAGS = 1
VOTE = 2  # numbers in a vote of a step's end, as it was
ROUNDS = 5  # the first one warms up
ALLOWED = 0.1  # of the cost of a vote
TARGETS = {"flags": f"cost at most {ALLOWED} of a vote, at every number of ranks"}

DELAY_LINE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct message { int fd; size_t size; struct timespec due; struct message *next; char bytes[]; };
static struct message *first, **last = &first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static ssize_t (*real_write)(int, const void *, size_t);

static void *deliver(void *unused) {
  for (;;) {
    pthread_mutex_lock(&lock);
    while (!first) pthread_cond_wait(&more, &lock);
    struct message *m = first;
    first = m->next;
    if (!first) last = &first;
    pthread_mutex_unlock(&lock);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &m->due, NULL);
    for (size_t sent = 0; sent < m->size;) {
      ssize_t n = real_write(m->fd, m->bytes + sent, m->size - sent);
      if (n > 0) sent += n;
      else if (errno == EAGAIN) { struct pollfd p = {m->fd, POLLOUT, 0}; poll(&p, 1, 1000); }
      else break;
    }
    free(m);
  }
}

static void start(void) {
  pthread_t thread;
  real_write = dlsym(RTLD_NEXT, "write");
  pthread_create(&thread, NULL, deliver, NULL);
}

static int is_network(int fd) {
  int domain = 0; socklen_t size = sizeof domain;
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6);
}

static ssize_t hold(int fd, const struct iovec *parts, int count) {
  size_t size = 0;
  for (int i = 0; i < count; i++) size += parts[i].iov_len;
  struct message *m = malloc(sizeof *m + size);
  m->fd = fd; m->size = size; m->next = NULL;
  for (size_t i = 0, at = 0; i < (size_t)count; at += parts[i++].iov_len)
    memcpy(m->bytes + at, parts[i].iov_base, parts[i].iov_len);
  clock_gettime(CLOCK_MONOTONIC, &m->due);
  long nanoseconds = m->due.tv_nsec + (long)(atof(getenv("DELAY_MS")) * 1e6);
  m->due.tv_sec += nanoseconds / 1000000000; m->due.tv_nsec = nanoseconds % 1000000000;
  pthread_mutex_lock(&lock);
  *last = m; last = &m->next;
  pthread_cond_signal(&more);
  pthread_mutex_unlock(&lock);
  return size;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  pthread_once(&once, start);
  if (is_network(fd)) return hold(fd, parts, count);
  return ((ssize_t (*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev"))(fd, parts, count);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  pthread_once(&once, start);
  if (is_network(fd)) return hold(fd, message->msg_iov, message->msg_iovlen);
  return ((ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg"))(fd, message, flags);
}

ssize_t send(int fd, const void *bytes, size_t size, int flags) {
  struct iovec part = {(void *)bytes, size};
  pthread_once(&once, start);
  if (is_network(fd)) return hold(fd, &part, 1);
  return ((ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send"))(fd, bytes, size, flags);
}
"""


def measure(world_size: int, times: int) -> dict[str, float]:
    """Case -> milliseconds of a step's agreement, the fastest round."""
    store = td.HashStore()
    seconds: dict[str, list[float]] = {}
    barrier = threading.Barrier(world_size)
    cases = {"norm": [NORMS], "norm and flags": [NORMS + FLAGS], "norm and vote": [NORMS, VOTE]}

    def rank(here: int) -> None:
        prefix = td.PrefixStore(f"agreement of {world_size}", store)
        limit = datetime.timedelta(seconds=120)
        group = td.ProcessGroupGloo(prefix, here, world_size, limit)
        for round_number in range(ROUNDS):
            for name, sizes in cases.items():
                barrier.wait()
                began = time.perf_counter()
                for _ in range(times):
                    for size in sizes:
                        group.allreduce([torch.zeros(size, dtype=torch.float64)]).wait()
                if here == 0 and round_number:
                    taken = (time.perf_counter() - began) / times
                    seconds.setdefault(name, []).append(taken)
        barrier.wait()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: 1000 * min(values) for name, values in seconds.items()}


def main() -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--delay-ms", type=float, default=5.0, help="of each message")
    options = options_parser.parse_args()
    if "DELAY_MS" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "delay.so"
            build = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
            subprocess.run([*build, "-lpthread"], input=DELAY_LINE, text=True, check=True)
            environment = {"LD_PRELOAD": str(library), "DELAY_MS": str(options.delay_ms)}
            command = [sys.executable, *sys.argv]
            return subprocess.call(command, env={**os.environ, **environment})
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    missed = []
    for world_size in (8, 32) if options.quick else (8, 32, 64):
        measured = measure(world_size, times=2 if options.quick else 5)
        flags = measured["norm and flags"] - measured["norm"]
        vote = measured["norm and vote"] - measured["norm"]
        rows.append(
            {
                "ranks": world_size,
                "sum of the norm, ms": round(measured["norm"], 1),
                "with the flags, ms": round(measured["norm and flags"], 1),
                "the flags cost, ms": round(flags, 1),
                "a vote costs, ms": round(vote, 1),
            }
        )
        if flags > ALLOWED * vote:
            missed.append(f"{world_size} ranks: the flags cost {flags:.1f} ms, a vote {vote:.1f}")
    return finish("agreement", rows, TARGETS, missed, options)


if __name__ == "__main__":
    sys.exit(main())
