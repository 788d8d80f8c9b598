# SPDX-License-Identifier: Apache-2.0
#
# One Makefile for everything. `make help` prints the lines that start with two number signs.
#
## Targets
##   all        programs, into build/bin (the default)
##   deps       install missing Debian packages, and libfuse into build/deps if the packaged one is too old
##   demo       train a small GPT through a mounted store that crashes, goes back to a kept step and sends it to another store,
##              and one that does not fit into its memory: deps, all, optim/torch/demo.py and demo_fit.py
##   check      lint, unit tests with ASan and UBSan, crash and model tests, mutants, tests on a mount and with PyTorch; ends on one
##              line of sums
##   check-long the same with more random states and steps per test, unit tests without sanitizers and with TSan, a mount under
##              TSan, and a build with clang
##   check-busy check beside stress-ng, which takes most of the processors and writes to the disk: no test depends on time
##   check-vm   a training loop on NVMe devices of a machine in QEMU, whose power is cut 20 times (HITRAIN_LONG=1: 200);
##              before that, the places of memory and threads in one with two NUMA nodes, stores on /dev/ngXnY, and a
##              device over NVMe/TCP whose connection is lost; some 8 minutes; skipped if QEMU is not installed
##   check-vault, check-ceph
##              the tests of vaults on a JuiceFS, and on a Ceph of one monitor and three storage daemons (tests/mount/engines.py); the
##              first run downloads some 120 MB, or 50 MB, into ~/.cache/hitrain
##   deps-vm    install QEMU, and unpack a Debian kernel for it into build/deps/vm
##   check-system  the Debian package in clean Debian 12 and 13 roots (part of check-long); the first run downloads some 150 MB
##              into ~/.cache/hitrain
##   deps-system  install debootstrap, and Prometheus and Chromium, which two mounted tests need
##   unit       unit tests only         (tests/unit/**/test_*.c)
##   states     crash and model tests   (tests/crash/crash_*.c, tests/model/model_*.c)
##   mutants    builds with one safeguard missing, each of which the crash tests must notice
##   mounted    tests of a real mount   (tests/mount/test_*.py)
##   torch      tests with PyTorch      (tests/optim/test_*.py)
##   check-ecosystem
##              the PyTorch client with the newest PyTorch, and with trainers of other packages, from the Python package
##              index; the first run downloads some 3 GB into ~/.cache/hitrain, and compiles a part of DeepSpeed
##   lint       include directions, headers compile alone, names, formatting, sizes, shell scripts, SPDX lines, lock types, held locks, `make deps all`;
##              circles of calls where something is built
##   format     rewrite all C files as .clang-format and tests/lint/layout.py say
##   check-gpu  hitrain.offload on a GPU; says so and ends well where there is none. GPU_PYTHON= is a Python whose PyTorch sees the GPU
##   races      tests of a real mount with a daemon that ThreadSanitizer watches (part of check-long)
##   coverage   lines that unit, crash, mounted and PyTorch tests run, by folder, and the functions that none runs, into
##              build/coverage/report.txt; TEST= selects some; 12 minutes
##   ways       functions, files and folders that a write, an fsync, a gradient, a step and a cold read enter in the daemon, by a build
##              of its own
##   fuzz       run every fuzz target (tests/fuzz/fuzz_*.c) with libFuzzer, FUZZ_SECONDS in all; new inputs go to build/fuzz.
##              check runs the inputs of tests/fuzz/corpus once
##   fuzz-merge add the inputs of build/fuzz that tests/fuzz/corpus lacks
##   libs       the layers' archives, into build/lib
##   tests      build all test programs, run none
##   clients    programs that mounted tests run on the mount (tests/programs/*.c), and bench/replay, which plays and simulates
##              traces (bench/replay/README.md)
##   bench      build and run bench/bench_*.c
##   bench-meta create, stat, rename, unlink, ... per second, beside ext4 seen through libfuse's passthrough_hp, which is
##              built for it; under 3 minutes; medians into build/bench/meta.jsonl
##   bench-kernel
##              update kernels in memory, one core and all, beside an in-place stream and PyTorch's fused AdamW; 5 minutes
##   bench-recovery
##              time and memory of mounting and checking by the number of chunks, 1e4 to 1e6 (HITRAIN_LONG=1: 1e7), beside
##              fio reading the log; log under churn; 1 minute; build/bench/recovery.jsonl and .svg
##   bench-client
##              the PyTorch client's own cost with 300 and with 20,000 parameters in memory, rates beside memcpy, four ranks beside
##              one, export; AGAINST= names another copy of the client to take turns with; 10 minutes
##   bench-gate cold reads of 4 KiB alone, and beside a scrub and a writer, on a device of steady speed, beside fio; 4 minutes,
##              2 with RUNS=1; DEVICE=limited takes a loop device that a cgroup limits
##   bench-background
##              steps and tensor I/O beside all engines in the background, and with these paused; 4 minutes; build/bench/background.jsonl
##   bench-space
##              space of checkpoints, copies, weights of a trained model; cold reads of compressed weights; beside btrfs and XFS with
##              duperemove; 14 minutes, 7 with STEPS=300 of training; SIZE= is the size of the copy in MiB (512); build/bench/space.jsonl
##   bench-aging
##              cold reads, steps and synced writes of a store that is old and almost full, beside a fresh one; 3 hours of churn,
##              or 24 with HITRAIN_LONG=1; 3 or 15 minutes; build/bench/aging.jsonl
##   bench-path reading and writing tensors through the mount, cold, hot and passthrough, beside fio on the same limited device, XFS, tmpfs
##              and libfuse's passthrough_hp; 20 minutes, 7 with RUNS=1; build/bench/path.jsonl and .svg
##   bench-plan made traces of training on a mount, beside memory for all; per cent of the ideal, and the targets;
##              10 minutes, 5 with RUNS=1; build/bench/plan.jsonl. BEFORE=PATH: only
##              training loops with plans, with hints of the program, and with neither, by the store of that tree; an hour
##   bench-step optimizer steps in the store, beside clients outside it and fio, on a device of known speed; bytes as the
##              device counts them; 10 minutes; all figures into build/bench/step.jsonl. DEVICES=2: only stores of two
##              devices, of equal and of different speed; 6 minutes. REDO=1: only steps that are durable by their gradients,
##              and a second store that follows them; 14 minutes with RUNS=1. FORMS=1: only state of 32, 16 and 8 bits, and Muon;
##              4 minutes. DELTAS=1: only steps with and without deltas; 6 minutes with RUNS=1. BEFORE=PATH: only steps of this build
##              beside those of another tree in which make has run, by turns; with REDO=1 steps that a mount computes again.
##              ELEMENTS=16777216: faster
##   bench-overlap
##              training steps that end with `step async` beside `step`, at three ratios of device time to computation; 3 minutes;
##              --elements=100663296 with bench/overlap.py is the full size; build/bench/overlap.jsonl
##   bench-steps
##              what kept steps cost: time and bytes of keeping each step, rollback and clone beside a mount, memory, send and receive
##              beside device and pipe; 10 minutes; build/bench/steps.jsonl. ELEMENTS=16777216 STEPS=2 RUNS=1: 1 minute
##   bench-vault
##              what an archiver and a silent vault cost steps; archive, restore and copies that follow beside what bounds them; bytes of
##              an elastic restore; a made-up vault of 3 million segments; 5 minutes; ONLY=train,copy,elastic,follow,sim takes some of
##              these; RUNS= STEPS= ELEMENTS= LIMIT= SEGMENTS=; build/bench/vault.jsonl
##   bench-cold a cold model beside `get` of whole segments, a local model and a restore; refusals of a silent vault; steps and commits beside
##              a slow and a silent device; paths=all beside the sum of both rates; a model four times the fast device; mount and fsck
##              of 1e6 and 4e6 cold chunks; 6 minutes; ONLY=vault,beside,paths,state,many takes some of these; RUNS= STEPS= ELEMENTS=
##              DEVICE= CHUNKS=1e6,8e7 (10 GB of memory and disk; the largest log has 8.8e7); build/bench/cold.jsonl
##   bench-muon a step of hitrain.Muon with everything resident, beside torch.optim.Muon; RUNS=, WIDTH= and BLOCKS=; 2 minutes;
##              build/bench/muon.jsonl
##   bench-moe  bytes of a step of 64 experts of which 4 are used, beside a model of those alone; 1 minute; build/bench/moe.jsonl
##   bench-converge
##              final losses of small models with moments of 32, 16 and 8 bits, beside torch's AdamW and Muon; RUNS= seeds, STEPS=, ONLY=gpt
##              and the like, JOBS= side by side; 15 minutes, and a run that was ended goes on; build/bench/converge.jsonl, .csv and .svg
##   bench-gpu  rates of copies to and from a GPU, and a step with offload() beside one all in the GPU; where none is, how well a step
##              overlaps on a stand-in; build/bench/gpu.jsonl, and a drawing of the step, gpu.svg
##   bench-fit  training what does not fit: offload() in an eighth of its memory beside all in memory, recomputation, XFS and
##              DeepSpeed, and the bound of the device; DTYPE=bf16, WIDTH= and BLOCKS= of the GPT; build/bench/fit.jsonl
##   profile    sample the daemon with perf during 20 s of training; report and flame graph into build/profile
##   wheel      the PyTorch client as a wheel, and one that has the programs, too, into build/wheel
##   install    put programs and man pages where mount and fsck look for them, and the PyTorch client where the system's
##              Python does (PREFIX= SBINDIR= PYTHONDIR= DESTDIR=)
##   install-client  the PyTorch client alone
##   deb        a Debian package of programs, manuals, completions, units and the PyTorch client, into build/deb (VERSION=)
##   uninstall  remove the installed files
##   clean      remove everything built except build/deps
##   distclean  remove build altogether
##   help       this text
##
## Knobs
##   V=1        show commands
##   SAN=       asan, ubsan, tsan, or several joined by commas; has its own folder, e.g. build/asan. coverage, alone:
##              count which lines run (build/coverage)
##   MUTANTS=1  with mutants to choose from by HITRAIN_MUTANT (tiering/base/mutant.h); has its own folder
##   LOCKS=1    end a program at the first lock taken out of order (include/hitrain/locks.h); builds with SAN= always do;
##              has its own folder, build/locks. Counts the basic blocks in each hold of a lock
##   FUZZ_SECONDS=  seconds for fuzz (300)
##   CC=        compiler; another one than gcc has its own folder, e.g. build/clang
##   CCACHE=    a cache of compiled objects (ccache, where it is installed); empty: none
##   TEST=      glob over test names or paths: only these are built and run, e.g. make unit TEST='test_ring*'
##   O=         folder for the build (build)
##   EXTRA_CFLAGS=  added last
##   PREFIX=    where install puts hitrain and hitrainctl (/usr/local)
##   SBINDIR=   where install puts mkfs.hitrain, mount.hitrain, umount.hitrain, hitrain-fsck (/usr/sbin: mount and fsck look nowhere else)
##   PYTHONDIR= where install puts the PyTorch client (the system's Python's first folder for packages; with another PREFIX the one there)
##   VERSION=   of the Debian package (the one that programs print)
##   DESTDIR=   put before every installed path
##
## Environment of tests and of the demo
##   HITRAIN_BIN    absolute path of the programs, HITRAIN_BUILD of the folder above it
##   HITRAIN_LONG   1 in check-long
##   HITRAIN_FLAKY  fail: no second chance for a test that fails once (tests/README.md)

ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

ifeq ($(origin CC),default)
CC := gcc
endif
AR ?= ar
PYTHON := /usr/bin/python3
PREFIX ?= /usr/local
# If /sbin is a link into /usr (all of Debian today), /usr/sbin is the folder that mount and fsck search.
SBINDIR ?= $(if $(shell test -L /sbin && echo merged),/usr/sbin,/sbin)
MANDIR ?= $(PREFIX)/share/man
# The folder for packages below PREFIX that the system's Python searches, or else the usual one there.
PYTHONDIR ?= $(shell $(PYTHON) -c 'import site, sys; p = sys.argv[1]; s = site.getsitepackages(); \
	print(*[d for d in s if p == "/usr/local" or d.startswith(p + "/lib")][:1] or \
	["%s/lib/python%d.%d/site-packages" % (p, *sys.version_info[:2])])' '$(PREFIX)' 2>/dev/null)
O ?= build
SAN ?=
TEST ?=
DEPS := build/deps

after_deps := $(if $(filter deps,$(MAKECMDGOALS)),$(filter-out deps,$(MAKECMDGOALS)))
ifneq ($(after_deps),)
# deps together with other goals: it ends before these begin. A new make builds them, because the installed packages
# decide how everything is compiled and linked.
.PHONY: deps $(after_deps) through-make-again
through-make-again: deps
	@$(MAKE) --no-print-directory $(after_deps)
$(after_deps): through-make-again
	@:
deps:
	@tests/tools/deps.sh
else

comma := ,
empty :=
space := $(empty) $(empty)
sans := $(subst $(comma), ,$(SAN))
ifneq ($(filter-out asan ubsan tsan fuzzer coverage,$(sans))$(if $(filter coverage,$(sans)),$(word 2,$(sans))),)
$(error SAN=$(SAN): asan, ubsan, tsan and (alone) coverage are known, and fuzzer with CC=clang)
endif
compiler := $(notdir $(firstword $(CC)))
# Objects come from a cache of compilers where one is installed: CCACHE= builds without.
CCACHE ?= $(shell command -v ccache)
variant := $(subst $(space),-,$(strip $(filter-out gcc cc,$(compiler)) $(sans) $(if $(LOCKS),locks)))
folder_of = $(O)$(if $(1),/$(1))
B := $(call folder_of,$(if $(MUTANTS),$(subst $(space),-,$(strip $(variant) mutants)),$(variant)))
# The same build without mutants.
PLAIN := $(call folder_of,$(variant))

# ---- sources: found by wildcard, so a new file or an empty folder needs no line here ----

PROGRAMS := hitrain mkfs.hitrain mount.hitrain umount.hitrain hitrain-fsck hitrainctl
dir_hitrain := fs/daemon
dir_mkfs.hitrain := mount-helpers/mkfs
dir_mount.hitrain := mount-helpers/mount
dir_umount.hitrain := mount-helpers/umount
dir_hitrain-fsck := mount-helpers/fsck
dir_hitrainctl := mount-helpers/hitrainctl

tools := $(wildcard mount-helpers/tools/*.py)
vault := $(wildcard mount-helpers/vault/*.py)
vault_programs := $(wildcard mount-helpers/vault/hitrain-vault-*)
installed_vault_programs := $(filter-out %-test,$(vault_programs))

HELPER_DIRS := $(filter-out fs/daemon,$(foreach p,$(PROGRAMS),$(dir_$(p))))
# Low to high. A unit test of a layer is linked only with that layer and those before it.
LAYERS := $(filter-out include/hitrain tests bench $(HELPER_DIRS),$(shell sed -n 's/^\([a-z][^:]*\):.*/\1/p' tests/lint/layers.conf))
# bench/replay is a program; tests of its parts are linked with its archive.
REPLAY_DIR := bench/replay
ARCHIVE_DIRS := $(LAYERS) $(HELPER_DIRS) tests/support $(REPLAY_DIR)

archive = $(if $(wildcard $(1)/*.c),$(B)/lib/lib$(subst /,-,$(1)).a)
# Only files that may be mutants are compiled for a build of mutants. It takes all others from the build without.
mutated := $(if $(MUTANTS),$(shell grep -rl --include='*.[ch]' 'base/mutant\.h"' $(ARCHIVE_DIRS)))
ifneq ($(filter %.h,$(mutated)),)
$(error $(filter %.h,$(mutated)): only files that are compiled include mutant.h)
endif
object_of = $(if $(MUTANTS),$(if $(filter $(mutated),$(1)),$(B),$(PLAIN)),$(B))/obj/$(patsubst %.c,%.o,$(1))
# Checks of a folder's structures are linked where something calls them: in tests, and in builds that look for errors.
objects = $(foreach s,$(wildcard $(1)/*.c tests/unit/$(1)/verify*.c),$(call object_of,$(s)))
reverse = $(if $(1),$(call reverse,$(wordlist 2,$(words $(1)),$(1))) $(firstword $(1)))
# $(call up_to,LAYER,LIST): LIST up to and including LAYER; the whole LIST where LAYER is not in it
up_to = $(if $(2),$(firstword $(2)) $(if $(filter-out $(1),$(firstword $(2))),$(call up_to,$(1),$(wordlist 2,$(words $(2)),$(2)))))
# Archives for something that may use layers up to $(1), in the order the linker wants.
archives_to = $(foreach l,$(call reverse,$(call up_to,$(1),$(LAYERS))),$(call archive,$(l)))

built_programs := $(foreach p,$(PROGRAMS),$(if $(wildcard $(dir_$(p))/*.c),$(p)))
unit_tests := $(patsubst %.c,%,$(sort $(shell find tests/unit -name 'test_*.c' 2>/dev/null)))
state_tests := $(patsubst %.c,%,$(sort $(wildcard tests/crash/crash_*.c tests/model/model_*.c)))
benches := $(patsubst %.c,%,$(sort $(wildcard bench/bench_*.c)))
clients := $(patsubst %.c,%,$(sort $(wildcard tests/programs/*.c)))
fuzz_targets := $(patsubst %.c,%,$(sort $(wildcard tests/fuzz/fuzz_*.c)))
fuzz_programs := $(patsubst %,$(B)/%,$(fuzz_targets))
test_programs := $(patsubst %,$(B)/%,$(unit_tests) $(state_tests))
client_programs := $(patsubst %,$(B)/%,$(clients))
bench_programs := $(patsubst %,$(B)/%,$(benches))
bench_clients := bench/meta_client bench/step_client bench/recovery_maker bench/path_client bench/steady_device

# ---- flags ----

WARN := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wmissing-declarations \
	-Wold-style-definition -Wpointer-arith -Wundef -Wvla -Wwrite-strings -Wredundant-decls -Wnested-externs \
	-Wformat=2 -Wno-format-nonliteral -Winit-self -Wunused -Wdate-time \
	-Wno-unused-parameter -Wno-missing-field-initializers
WARN_gcc := -Wlogical-op -Wimplicit-fallthrough=5 -Wtrampolines
WARN_clang := -Wimplicit-fallthrough -Wno-gnu-folding-constant -Wno-unknown-warning-option -Wno-unused-command-line-argument
# The extra code of sanitizers, and fewer optimizations, make gcc report unset variables that are set.
WARN_gcc_san := -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-stringop-overread -Wno-array-bounds

is_clang := $(findstring clang,$(compiler))
san_names := $(subst $(space),$(comma),$(strip $(patsubst asan,address,$(patsubst ubsan,undefined,$(patsubst tsan,thread,$(patsubst fuzzer,fuzzer-no-link,$(sans)))))))
SAN_FLAGS := $(if $(filter coverage,$(sans)),--coverage -fprofile-update=atomic,$(if $(sans),-fsanitize=$(san_names) \
	-fno-sanitize-recover=all -fno-omit-frame-pointer))
# The order of locks is checked in builds that look for errors (include/hitrain/locks.h).
LOCK_FLAGS := $(if $(filter-out coverage,$(sans))$(LOCKS),-DHT_LOCK_CHECK) $(if $(LOCKS),-DHT_LOCK_BLOCKS)
# So are whole structures (tiering/base/verify.h).
VERIFY_FLAGS := $(if $(filter-out coverage,$(sans)),-DHT_VERIFY_STATE)
# LOCKS=1 counts basic blocks in the daemon's code. Kernels take no locks.
blocks_of = $(if $(LOCKS),$(if $(filter tiering/% optim/% fs/%,$(filter-out optim/rules/kernel_%,$(1))),-fsanitize-coverage=trace-pc))
MUTANT_FLAGS := $(if $(MUTANTS),-DHT_MUTANTS)

# Tests compile four times as fast without most optimizations, and what they test is compiled apart. Reports of
# sanitizers need lines, but no variables.
LEVEL := $(if $(filter asan ubsan,$(sans)),-O1 -g1,-O2 -g)
TEST_LEVEL := -Og -g1
# No contraction: results are bit-identical on every instruction set; code that fuses says fmaf.
CFLAGS_ALL = -std=gnu11 $(LEVEL) -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -ffp-contract=off -fstack-protector-strong -pthread \
	$(WARN) $(if $(is_clang),$(WARN_clang),$(WARN_gcc) $(if $(sans),$(WARN_gcc_san))) \
	$(if $(sans),$(SAN_FLAGS),-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2) $(LOCK_FLAGS) $(VERIFY_FLAGS) -Iinclude -I.

# Code for newer processors stands in files of its own, is chosen at run time, and is empty elsewhere. ASan's stacks for
# detect_stack_use_after_return are aligned to 32 bytes, and GCC stores 64 there (GCC bug 110027). Code of AVX2 has the same source.
x86 := $(findstring x86_64,$(shell $(CC) -dumpmachine 2>/dev/null))
isa_flags = $(if $(x86),$(if $(filter %_avx2.c,$(1)),-mavx2 -mfma -mf16c -mbmi -mbmi2 -mprfchw)$(if $(filter \
	%_avx512.c,$(1)),-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprfchw $(if $(filter asan,$(sans)),-fno-sanitize=address)))

# Debian 12 has libfuse 3.14; `make deps` built a newer one there.
ifneq ($(wildcard $(DEPS)/usr/lib/libfuse3.a),)
FUSE_CFLAGS := -isystem $(DEPS)/usr/include/fuse3
FUSE_LIBS := $(DEPS)/usr/lib/libfuse3.a -ldl
else
FUSE_CFLAGS := $(shell pkg-config --cflags fuse3 2>/dev/null)
FUSE_LIBS := $(shell pkg-config --libs fuse3 2>/dev/null)
endif
CHECK_LIBS := $(shell pkg-config --libs check 2>/dev/null)

level_of = $(if $(filter tests/%,$(1)),$(TEST_LEVEL))
dir_flags = $(if $(filter fs/fuse/% tests/unit/fs/fuse/% bench/steady_device.c,$(1)),$(FUSE_CFLAGS))$(if $(filter mount-helpers/mount/% mount-helpers/fsck/%,$(1)),-DHT_BINDIR='"$(PREFIX)/bin"')
# Hundreds of test programs are linked with ASan: by the fastest linker that is installed.
LINKER := $(if $(filter asan,$(sans)),$(firstword $(foreach l,lld gold,$(if $(shell command -v ld.$(l)),-fuse-ld=$(l)))))
LDFLAGS_ALL = $(SAN_FLAGS) $(LINKER) -pthread -Wl,--as-needed -Wl,-z,relro,-z,now $(LDFLAGS)
LIBS := -luring -lnuma -lzstd -lxxhash -lblkid -lm
# The programs of a wheel (BUNDLE=1) have their libraries with them. Those under the LGPL stay files of their own, which a user may replace, and
# so does libxxhash: Debian's static one does not choose code for the processor.
ifdef BUNDLE
LIBS := -Wl,-Bstatic -luring -lzstd -Wl,-Bdynamic -lxxhash -lnuma -lblkid -lm
LDFLAGS_ALL += -Wl,-rpath,'$$ORIGIN/../lib'
FUSE_LIBS := $(if $(wildcard $(DEPS)/usr/lib/libfuse3.so),-L$(DEPS)/usr/lib) -lfuse3
endif

Q := $(if $(V),,@)
say = $(if $(V),,$(info $(space) $(1)  $(2)))

# $(call link,FLAGS,LIBRARIES): the recipe of a program
define link
$(call say,LD,$@)
@mkdir -p $(@D)
$(Q)$(CC) $(LDFLAGS_ALL) $(1) -o $@ $^ $(2)
endef

# ---- rules ----

.PHONY: all libs tests clients
python_files := $(patsubst mount-helpers/%,$(B)/share/hitrain/%,$(tools) $(vault))
all: $(patsubst %,$(B)/bin/%,$(built_programs) $(notdir $(vault_programs))) $(python_files) $(B)/share/compiled libs
libs: $(foreach d,$(LAYERS),$(call archive,$(d)))
tests: $(test_programs) $(fuzz_programs) $(B)/tests/fuzz/seeds clients
clients: $(client_programs) $(B)/bench/replay $(patsubst %,$(B)/%,$(bench_clients))

# hitrainctl runs them from the folder beside its own. Python compiles nothing at each command, then.
$(B)/share/hitrain/%: mount-helpers/%
	@mkdir -p $(@D); cp $< $@
$(B)/share/compiled: $(python_files)
	@mkdir -p $(@D); $(PYTHON) -ISm compileall -q $(@D) && touch $@
$(patsubst %,$(B)/bin/%,$(notdir $(vault_programs))): $(B)/bin/%: mount-helpers/vault/%
	@mkdir -p $(@D); cp $< $@

# Rebuilds when the command has changed.
flags_now := $(CC) | $(PREFIX) | $(CFLAGS_ALL) $(TEST_LEVEL) $(EXTRA_CFLAGS) | $(LDFLAGS_ALL) | $(FUSE_LIBS)
FORCE:
.PHONY: FORCE

# $(call object_rules,FOLDER,MORE FLAGS)
define object_rules
$(1)/flags: FORCE
	@mkdir -p $$(@D); echo '$$(flags_now)' | cmp -s - $$@ || echo '$$(flags_now)' >$$@
$(1)/obj/%.o: %.c $(1)/flags
	$$(call say,CC,$$<)
	@mkdir -p $$(@D)
	$$(Q)$$(CCACHE) $$(CC) $$(CFLAGS_ALL) $(2) $$(call level_of,$$<) $$(call dir_flags,$$<) $$(call isa_flags,$$<) $$(call blocks_of,$$<) $$(EXTRA_CFLAGS) -MMD -MP -c -o $$@ $$<
endef
$(eval $(call object_rules,$(B),$(MUTANT_FLAGS)))
$(if $(MUTANTS),$(eval $(call object_rules,$(PLAIN))))

define archive_rule
$(call archive,$(1)): $(call objects,$(1)) $(B)/lib/$(subst /,-,$(1)).members
	$$(call say,AR,$$@)
	$$(Q)rm -f $$@; $$(AR) rcs $$@ $$(filter %.o,$$^)
# Rebuilds, too, when a file was removed.
$(B)/lib/$(subst /,-,$(1)).members: FORCE
	@mkdir -p $$(@D); echo '$(call objects,$(1))' | cmp -s - $$@ || echo '$(call objects,$(1))' >$$@
endef
$(foreach d,$(ARCHIVE_DIRS),$(if $(wildcard $(d)/*.c),$(eval $(call archive_rule,$(d)))))

# The objects of a program's own folder are linked as they are; the archives serve everything else.
not_for_helpers := $(foreach l,fs/fuse fs/daemon,$(call archive,$(l)))
program_archives = $(if $(filter fs/daemon,$(1)),$(call archives_to,fs/fuse),$(filter-out $(not_for_helpers),$(call archives_to,all)))
define program_rule
$(B)/bin/$(1): $(call objects,$(dir_$(1))) $(call program_archives,$(dir_$(1)))
	$$(call link,,$(if $(filter fs/daemon,$(dir_$(1))),$$(FUSE_LIBS)) $$(LIBS))
endef
$(foreach p,$(built_programs),$(eval $(call program_rule,$(p))))

# Tests of failing calls stand between the project and the C library (tests/support/wrap.h).
failing_calls := tests/unit/fs/fuse/test_requests tests/unit/optim/gradient/test_open \
	tests/unit/tiering/engine/test_compress tests/unit/tiering/engine/test_scrub \
	tests/unit/tiering/engine/test_planner tests/unit/tiering/tier/test_next_use \
	tests/unit/tiering/engine/test_scheduler
wrapped := malloc calloc realloc aligned_alloc posix_memalign ht_pages_new pthread_create
wrap_flags = $(patsubst %,-Wl$(comma)--wrap=%,$(1))
# What tests keep for the next store stands between the store and tiering/sys (tests/support/memory.h).
memory_flags := $(call wrap_flags,ht_pinned_alloc ht_pinned_free ht_quota_find ht_processors_usable) -Wl,-u,__wrap_ht_pinned_alloc
# So does what notes assertions between tests and Check (tests/support/mark.c).
test_flags = $(call wrap_flags,_mark_point) $(if $(filter tests/unit/faults/% $(failing_calls),$(1)),$(call wrap_flags,$(wrapped))) \
	$(if $(filter tests/unit/tiering/data/test_shares,$(1)),$(call wrap_flags,ht_shares_update)) \
	$(if $(filter bench/% tests/unit/tiering/base/%,$(1)),,$(memory_flags)) \
	$(if $(filter bench/bench_arena,$(1)),$(call wrap_flags,ht_pinned_alloc ht_pinned_free))

# layer_of: tests/unit/tiering/io/test_x -> tiering/io
layer_of = $(patsubst tests/unit/%/,%,$(dir $(1)))
# Tests of these folders open a whole store, or a whole optimizer: they are linked with the layer that opens it.
opened_by_tiering/object := tiering/store
opened_by_tiering/data := tiering/store
opened_by_tiering/shm := tiering/store
opened_by_tiering/txn := tiering/store
opened_by_tiering/engine := tiering/store
opened_by_optim/state := optim/step
opened_by_optim/gradient := optim/step
opened_by_optim/redo := optim/step
linked_to = $(or $(opened_by_$(call layer_of,$(1))),$(call layer_of,$(1)))
helper_archives := $(foreach d,$(HELPER_DIRS),$(call archive,$(d)))
test_archives = $(call archive,tests/support) $(if $(filter $(LAYERS),$(call layer_of,$(1))),,$(helper_archives) $(call archive,$(REPLAY_DIR))) \
	$(call archives_to,$(call linked_to,$(1)))
define test_rule
$(B)/$(1): $(B)/obj/$(1).o $(call test_archives,$(1))
	$$(call link,$$(call test_flags,$(1)),$$(CHECK_LIBS) $$(FUSE_LIBS) $$(LIBS))
endef
$(foreach t,$(unit_tests) $(state_tests) $(benches) $(bench_clients),$(eval $(call test_rule,$(t))))

# The simulator's arena has no memory (bench/no_memory.h).
$(B)/bench/replay: $(call objects,$(REPLAY_DIR)) $(call archives_to,tiering/cache)
	$(call link,$(call wrap_flags,ht_pinned_alloc ht_pinned_free),$(LIBS))

# The fuzzer has a main of its own. Check's assertions, which helpers use, work without Check.
fuzz_main := $(if $(filter fuzzer,$(sans)),,$(B)/obj/tests/fuzz/replay.o)
fuzz_objects := $(fuzz_main) $(B)/obj/tests/fuzz/check.o
define fuzz_rule
$(B)/$(1): $(B)/obj/$(1).o $(fuzz_objects) $(call test_archives,$(1))
	$$(call link,$$(call test_flags,$(1)) $(if $(fuzz_main),,-fsanitize=fuzzer),$$(FUSE_LIBS) $$(LIBS))
endef
$(foreach t,$(fuzz_targets),$(eval $(call fuzz_rule,$(t))))
$(B)/tests/fuzz/seeds: $(B)/obj/tests/fuzz/seeds.o $(B)/obj/tests/fuzz/check.o $(call test_archives,tests/fuzz/seeds)
	$(call link,,$(FUSE_LIBS) $(LIBS))

# Programs that run on a mount are independent of hitrain: one file and the C library. They run anywhere else, too.
$(client_programs): $(B)/%: $(B)/obj/%.o
	$(call link)
.SECONDARY:

-include $(shell find $(sort $(wildcard $(B)/obj $(if $(MUTANTS),$(PLAIN)/obj))) /dev/null -name '*.d')

# ---- tests ----

# The runner builds the tests that it runs, with the knobs given here. Tests and the demo find the programs in $HITRAIN_BIN.
given_bin := $(if $(filter environment,$(origin HITRAIN_BIN)),$(HITRAIN_BIN))
export HITRAIN_BIN := $(abspath $(B))/bin
export HITRAIN_BUILD := $(abspath $(B))
export PYTHONPYCACHEPREFIX := $(abspath $(O))/pycache
# Compiled modules are written there, also where the environment wants none: else each process would compile all again.
unexport PYTHONDONTWRITEBYTECODE
runner = $(PYTHON) tests/tools/run.py --make '$(MAKE)' --out '$(O)' --cc '$(CC)' --san '$(SAN)' --test '$(TEST)' \
	$(if $(V),--verbose) $(if $(EXTRA_CFLAGS),--set 'EXTRA_CFLAGS=$(EXTRA_CFLAGS)')

.PHONY: deps check check-busy check-long check-ecosystem check-vm deps-vm deps-system unit states mutants mounted torch bench lint format demo
deps:
	@tests/tools/deps.sh

check: deps
	@$(runner) check
# Skipped where no GPU is, before anything is built. With HITRAIN_BIN, the programs of that folder are taken, and nothing is built.
gpu_programs = $(if $(given_bin),true,$(MAKE) --no-print-directory all)
check-gpu bench-gpu: export HITRAIN_BIN := $(or $(given_bin),$(abspath $(B))/bin)
GPU_PYTHON ?= $(PYTHON)
.PHONY: check-gpu bench-gpu
check-gpu:
	@$(GPU_PYTHON) tests/tools/gpu.py $@ sh -c '$(gpu_programs) && \
		exec $(GPU_PYTHON) -m pytest -q -p no:cacheprovider tests/gpu'
bench-gpu:
	@$(GPU_PYTHON) tests/tools/gpu.py $@ sh -c '$(gpu_programs) && exec $(GPU_PYTHON) bench/gpu.py $(if $(RUNS),--runs $(RUNS))'
check-busy: deps
	@$(runner) check-busy
check-long: deps
	@HITRAIN_LONG=1 $(runner) check-long
check-ecosystem:
	@tests/tools/deps.sh ecosystem
	@$(runner) ecosystem
FUZZ_SECONDS ?= 300
.PHONY: fuzz fuzz-merge
fuzz: deps
	@$(runner) fuzz --seconds '$(FUZZ_SECONDS)'
fuzz-merge: deps
	@$(runner) fuzz-merge
.PHONY: coverage
coverage: deps
	@$(runner) coverage
.PHONY: ways
ways: deps
	@$(MAKE) --no-print-directory O=$(O)/ways EXTRA_CFLAGS='-finstrument-functions -Wno-error'
	@$(PYTHON) tests/tools/ways.py $(O)/ways
.PHONY: races
races: deps
	@$(runner) races
.PHONY: check-system
check-system: deps
	@tests/tools/deps.sh system
	@$(runner) system
unit states mutants mounted torch bench:
	@$(runner) $@

# bench-NAME runs bench/NAME.py. What it needs: packages of deps.sh, and programs beside those of all.
bench_deps_aging := bench-path
bench_deps_fit := bench-fit
bench_deps_gate := bench-path
bench_deps_meta := bench-meta
bench_deps_path := bench-path
bench_deps_space := bench-space
bench_deps_step := bench-step
bench_needs_cold := bench/steady_device bench/recovery_maker
bench_needs_gate := bench/steady_device
bench_needs_kernel := bench/bench_kernel
bench_needs_meta := bench/meta_client
bench_needs_path := bench/path_client
bench_needs_plan := bench/replay bench/bench_planner
bench_needs_recovery := bench/recovery_maker
bench_needs_space := bench/bench_codec
bench_needs_step := bench/step_client
# RUNS=3 is --runs=3 of the script; DEVICES=2, REDO=1, FORMS=1 and DELTAS=1 are words without a value.
bench_knobs := RUNS:runs STEPS:steps ELEMENTS:elements AGAINST:against BEFORE:before DEVICE:device DTYPE:dtype WIDTH:width \
	BLOCKS:layers LIMIT:limit ONLY:only JOBS:jobs SEGMENTS:segments CHUNKS:chunks
knob_of = $(firstword $(subst :, ,$(1)))
bench_args = $(foreach k,$(bench_knobs),$(if $($(call knob_of,$(k))),'--$(lastword $(subst :, ,$(k)))=$($(call knob_of,$(k)))')) \
	$(if $(DEVICES),--devices) $(if $(REDO),--redo) $(if $(FORMS),--forms) $(if $(DELTAS),--deltas)
# A new make, because the installed packages decide how everything is linked.
bench-%:
	@tests/tools/deps.sh $(bench_deps_$*)
	@$(MAKE) --no-print-directory all $(addprefix $(B)/,$(bench_needs_$*))
	@mkdir -p $(B)/bench
	@$(PYTHON) bench/$*.py $(bench_args)

.PHONY: profile
profile: deps
	@$(MAKE) --no-print-directory all
	@$(PYTHON) bench/profile_daemon.py

# A machine that boots needs minutes, so this is no part of check.
check-vm:
	@$(MAKE) --no-print-directory all clients
	@$(MAKE) --no-print-directory tests TEST='test_[nm][eu]m*'
	@$(MAKE) --no-print-directory tests TEST='tests/unit/tiering/io/*'
	@$(MAKE) --no-print-directory tests TEST='test_points*'
	@$(PYTHON) tests/qemu/nodes.py
	@$(PYTHON) tests/qemu/raw.py
	@$(PYTHON) tests/qemu/fabrics.py
	@$(PYTHON) tests/qemu/cuts.py
# Each test has a limit of its own, and the whole has one.
vault_engine_check-vault := juicefs
vault_engine_check-ceph := rados
.PHONY: check-vault check-ceph
check-vault check-ceph: deps
	@$(MAKE) --no-print-directory all
	@HITRAIN_ENGINES=$(vault_engine_$@) timeout 1800 $(PYTHON) -m pytest -q -x -p no:cacheprovider tests/mount/test_vault*.py
deps-vm:
	@tests/tools/deps.sh vm
deps-system:
	@tests/tools/deps.sh system

lint:
	@$(runner) lint
format:
	@tests/lint/format.sh --fix

# A new make, because the installed packages decide how everything is linked.
demo: deps
	@$(MAKE) --no-print-directory all
	@$(PYTHON) optim/torch/demo.py $(DEMO)
	@$(PYTHON) optim/torch/demo_fit.py

# ---- install ----

.PHONY: install install-client uninstall wheel clean distclean help
man_pages := $(wildcard mount-helpers/man/*.[78])
in_bin := $(filter hitrain hitrainctl,$(built_programs))
in_sbin := $(filter-out $(in_bin),$(built_programs))
client_package := $(wildcard optim/torch/hitrain/*.py) optim/torch/hitrain/py.typed

install: all
	install -d '$(DESTDIR)$(PREFIX)/bin' '$(DESTDIR)$(SBINDIR)'
	$(if $(in_bin),install -m 755 $(addprefix $(B)/bin/,$(in_bin)) '$(DESTDIR)$(PREFIX)/bin')
	$(if $(in_sbin),install -m 755 $(addprefix $(B)/bin/,$(in_sbin)) '$(DESTDIR)$(SBINDIR)')
	$(if $(filter hitrain-fsck,$(in_sbin)),ln -sf hitrain-fsck '$(DESTDIR)$(SBINDIR)/fsck.hitrain')
	$(if $(filter mount.hitrain,$(in_sbin)),ln -sf mount.hitrain '$(DESTDIR)$(SBINDIR)/mount.fuse.hitrain')
	$(if $(filter umount.hitrain,$(in_sbin)),ln -sf umount.hitrain '$(DESTDIR)$(SBINDIR)/umount.fuse.hitrain')
	$(if $(PYTHONDIR),$(MAKE) --no-print-directory install-client,@echo 'there is no $(PYTHON), so the PyTorch client is not installed')
	$(foreach s,7 8,install -d '$(DESTDIR)$(MANDIR)/man$(s)' && install -m 644 $(filter %.$(s),$(man_pages)) '$(DESTDIR)$(MANDIR)/man$(s)' &&) :
	install -m 755 $(installed_vault_programs) '$(DESTDIR)$(PREFIX)/bin'
	install -d '$(DESTDIR)$(PREFIX)/share/hitrain/tools' '$(DESTDIR)$(PREFIX)/share/hitrain/vault'
	install -m 644 $(tools) '$(DESTDIR)$(PREFIX)/share/hitrain/tools'
	install -m 644 $(vault) '$(DESTDIR)$(PREFIX)/share/hitrain/vault'
	$(if $(DESTDIR),,$(PYTHON) -ISm compileall -q '$(PREFIX)/share/hitrain')
	install -m 644 mount-helpers/monitoring/grafana.json mount-helpers/monitoring/alerts.yaml '$(DESTDIR)$(PREFIX)/share/hitrain'

install-client:
	$(if $(PYTHONDIR),,$(error no folder for packages of $(PYTHON): name one in PYTHONDIR=))
	install -d '$(DESTDIR)$(PYTHONDIR)/hitrain'
	install -m 644 $(client_package) '$(DESTDIR)$(PYTHONDIR)/hitrain'

# Two: one is pure Python, one has the programs, too, for this architecture. Copies are built, so that nothing is left among the sources.
wheel:
	@rm -rf '$(O)/wheel' && mkdir -p '$(O)/wheel'
	@$(MAKE) --no-print-directory O='$(O)/bundle' B='$(O)/bundle' BUNDLE=1 all >/dev/null
	@PYTHON='$(PYTHON)' mount-helpers/package/wheel.sh '$(O)/bundle' '$(O)/wheel' $(client_package)
	@ls '$(O)'/wheel/*.whl

# Built apart, because the prefix is compiled in.
VERSION ?= $(shell sed -n 's/.*HT_VERSION "\(.*\)"/\1/p' include/hitrain/version.h)
.PHONY: deb
deb:
	@rm -rf '$(O)/deb/root'
	@$(MAKE) --no-print-directory O='$(O)/deb' PREFIX=/usr SBINDIR=/usr/sbin PYTHONDIR=/usr/lib/python3/dist-packages \
		DESTDIR='$(abspath $(O))/deb/root' install >/dev/null
	@HITRAIN_BIN='$(abspath $(O))/deb/bin' mount-helpers/package/deb.sh '$(abspath $(O))/deb/root' '$(VERSION)' '$(O)/deb'

uninstall:
	rm -f $(foreach p,hitrain hitrainctl $(notdir $(installed_vault_programs)),'$(DESTDIR)$(PREFIX)/bin/$(p)') \
		$(foreach p,mkfs.hitrain mount.hitrain mount.fuse.hitrain umount.hitrain umount.fuse.hitrain hitrain-fsck fsck.hitrain,'$(DESTDIR)$(SBINDIR)/$(p)') \
		$(foreach m,$(notdir $(man_pages)),'$(DESTDIR)$(MANDIR)/man$(subst .,,$(suffix $(m)))/$(m)')
	rm -rf '$(DESTDIR)$(PREFIX)/share/hitrain'
	$(if $(PYTHONDIR),rm -rf '$(DESTDIR)$(PYTHONDIR)/hitrain')

# What `pip install ./optim/torch` leaves: a later one would install modules from there that are no more.
pip_outputs := optim/torch/build optim/torch/hitrain.egg-info
clean:
	@! test -d '$(O)' || find '$(O)' -mindepth 1 -maxdepth 1 ! -path '$(DEPS)' -exec rm -rf {} +
	@rm -rf $(pip_outputs)
distclean:
	rm -rf '$(O)' '$(DEPS)' $(pip_outputs)

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

endif
