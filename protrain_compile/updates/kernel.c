/* Host updates: one pass over memory, on a pool of threads that sleep, and do not spin, between jobs.
 *
 * Built by native.py with the system compiler; no headers beyond libc and pthreads. The arithmetic is that of
 * definition.py. Work is cut into blocks of BLOCK elements, taken by the threads one by one, so that a thread whose
 * core is busy elsewhere delays nobody. All loops vectorise, and infinities and NaN behave as IEEE 754 says: do not
 * build this with -ffast-math. Results do not depend on the number of threads: sums are taken per block and added
 * in order.
 *
 * A pool's work is called for directly, or through a queue: a thread of its own that runs jobs one after another and
 * announces each to host threads and to device streams. Nothing here ever needs Python's interpreter lock.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum { BLOCK = 16384 }; /* elements a thread takes at once: about 0.1 ms */

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t half_bits; /* bf16 or fp16 */

INLINE uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

/* ---- 16-bit formats ---------------------------------------------------------------------------------------- */

INLINE float float_of_bf16(half_bits value) { return float_of((uint32_t)value << 16); }

INLINE half_bits bf16_of_float(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (half_bits)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

/* fp16 by scaling: the exponent is moved into fp32's range and one multiplication or subtraction mends denormals,
 * infinities and NaN. Plain integer and fp32 operations vectorise everywhere, fp16 types do not. */
INLINE float float_of_fp16(half_bits value) {
    uint32_t sign = ((uint32_t)value & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)value & 0x7fffu;
    float normal = float_of((magnitude << 13) + (0xe0u << 23)) * 0x1.0p-112f;
    float denormal = float_of(magnitude | (126u << 23)) - 0.5f;
    return float_of(sign | bits_of(magnitude < 0x400u ? denormal : normal));
}

INLINE half_bits fp16_of_float(float value) { /* to nearest, ties to even; overflow gives infinity */
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    float scaled = (float_of(magnitude) * 0x1.0p+112f) * 0x1.0p-110f; /* infinity from 2^16 on */
    uint32_t exponent = magnitude & 0x7f800000u;
    exponent = exponent < 0x38800000u ? 0x38800000u : exponent;
    uint32_t rounded = bits_of(float_of(exponent + 0x07800000u) + scaled); /* the addition rounds the mantissa */
    uint32_t finite = ((rounded >> 13) & 0x7c00u) + (rounded & 0xfffu);
    return (half_bits)(((bits >> 16) & 0x8000u) | (magnitude > 0x7f800000u ? 0x7e00u : finite));
}

/* ---- the pool ------------------------------------------------------------------------------------------------ */

typedef void (*task_function)(void *job, int64_t task);

typedef struct {
    pthread_mutex_t turn;       /* held by whoever runs a job: one at a time */
    pthread_mutex_t lock;       /* guards all below but `next` and `users` */
    pthread_cond_t work, idle;
    task_function run;
    void *job;
    int64_t tasks;
    atomic_int_fast64_t next;   /* first task that nobody has taken */
    atomic_int users;           /* its owner and its queues; the last to leave ends it */
    int active, stop, count;    /* workers inside a job; leave now; workers started */
    pid_t owner;                /* after fork() the child has no workers */
    pthread_t workers[];
} pool;

/* Results below 2^-126 become 0 while a job runs. A moment that decays towards 0 would otherwise stay in the
 * denormal range for good, where each operation takes a hundred times as long. */
static unsigned long flush_denormals(void) {
#if defined(__x86_64__)
    unsigned long before = _mm_getcsr();
    _mm_setcsr((unsigned int)before | 0x8000u);
    return before;
#elif defined(__aarch64__)
    unsigned long before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | (1ul << 24)));
    return before;
#else
    return 0;
#endif
}

static void restore_denormals(unsigned long before) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned int)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

static void take_tasks(pool *p, task_function run, void *job, int64_t tasks) {
    unsigned long mode = flush_denormals();
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (task >= tasks) break;
        run(job, task);
    }
    restore_denormals(mode);
}

static void *work(void *argument) {
    pool *p = argument;
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        if (p->run == NULL || atomic_load_explicit(&p->next, memory_order_relaxed) >= p->tasks) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        task_function run = p->run;
        void *job = p->job;
        int64_t tasks = p->tasks;
        p->active++;
        pthread_mutex_unlock(&p->lock);
        take_tasks(p, run, job, tasks);
        pthread_mutex_lock(&p->lock);
        if (--p->active == 0) pthread_cond_signal(&p->idle);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void run_alone(task_function run, void *job, int64_t tasks) {
    unsigned long mode = flush_denormals();
    for (int64_t task = 0; task < tasks; task++) run(job, task);
    restore_denormals(mode);
}

/* Runs tasks 0..tasks-1 of a job on the workers and the caller; returns when all are done. A worker that has not
 * woken by then is not waited for. A forked child has no workers, and its locks are as the parent's threads left
 * them: it works alone. */
static void pool_run(pool *p, task_function run, void *job, int64_t tasks) {
    if (p->owner != getpid()) {
        run_alone(run, job, tasks);
        return;
    }
    int shared = tasks > 1 && p->count > 0;
    pthread_mutex_lock(&p->turn);
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->next, 0);
    p->run = shared ? run : NULL;
    p->job = job;
    p->tasks = tasks;
    if (shared) pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    take_tasks(p, run, job, tasks);
    pthread_mutex_lock(&p->lock);
    while (p->active > 0) pthread_cond_wait(&p->idle, &p->lock);
    p->run = NULL;
    pthread_mutex_unlock(&p->lock);
    pthread_mutex_unlock(&p->turn);
}

static int start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the main thread's */
    int error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* A pool of `threads` threads, one of which is whoever calls; NULL without memory. */
pool *protrain_pool_create(int threads) {
    pool *p = calloc(1, sizeof(pool) + (size_t)threads * sizeof(pthread_t));
    if (p == NULL) return NULL;
    pthread_mutex_init(&p->turn, NULL);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->idle, NULL);
    p->owner = getpid();
    p->users = 1;
    while (p->count < threads - 1 && start_thread(&p->workers[p->count], work, p) == 0) p->count++;
    return p;
}

int protrain_pool_threads(const pool *p) { return p->count + 1; }

/* Ends the pool, or leaves that to its last queue. */
void protrain_pool_destroy(pool *p) {
    if (p->owner != getpid()) return; /* a forked child: the workers and the locks are the parent's */
    if (atomic_fetch_sub(&p->users, 1) > 1) return;
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->count; i++) pthread_join(p->workers[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->idle);
    pthread_mutex_destroy(&p->lock);
    pthread_mutex_destroy(&p->turn);
    free(p);
}

/* ---- updates ------------------------------------------------------------------------------------------------- */

enum kind { ADAM = 0, ADAM_AMSGRAD = 1, SGD = 2, SGD_MOMENTUM = 3, SGD_NESTEROV = 4 };
enum dtype { BF16 = 0, FP16 = 1, FP32 = 2 };
enum format { FORMAT_SPLIT = 0, FORMAT_FP32 = 1, FORMAT_FP16 = 2 };

typedef struct {
    int64_t begin, end;
    int64_t first_block; /* how many blocks the segments before this one have */
    int32_t kind;
    float gradient_factor, decay, l2, moment1_keep, moment1_rate, moment2_keep, moment2_rate, moment2_correction;
    float eps, step_size;
} segment;

typedef struct {
    void *param, *companion;
    float *moment1, *moment2, *moment2_max;
    const void *gradient;
    const segment *segments;
    int64_t segment_count;
    int32_t format, gradient_dtype;
} update_job;

INLINE float merge(half_bits high, int16_t low) {
    return float_of(((uint32_t)high << 16) + (uint32_t)(int32_t)low);
}

INLINE uint32_t quiet(uint32_t bits) { /* a NaN's payload could round up to infinity or -0.0 */
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0x80000000u) | 0x7fc00000u : bits;
}

/* The loop over memory. `format`, `gradient` and `kind` are constants wherever this is inlined, so that each loop
 * has one straight body: interleaving loads, arithmetic and stores is 10-25% faster a core than a pass for each. */
INLINE void update_range(
    const segment *s, const update_job *job, int64_t begin, int64_t end,
    const int format, const int gradient, const int kind) {
    half_bits *restrict high = job->param;
    int16_t *restrict low = job->companion;
    float *restrict master = format == FORMAT_FP16 ? job->companion : job->param;
    float *restrict m = job->moment1, *restrict v = job->moment2, *restrict v_max = job->moment2_max;
    const half_bits *restrict halves = job->gradient;
    const float *restrict floats = job->gradient;
    const float factor = s->gradient_factor, l2 = s->l2, decay = s->decay, step = -s->step_size;
    const float keep1 = s->moment1_keep, rate1 = s->moment1_rate, keep2 = s->moment2_keep, rate2 = s->moment2_rate;
    const float correction = s->moment2_correction, eps = s->eps;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        float p = format == FORMAT_SPLIT ? merge(high[i], low[i]) : master[i];
        float g = gradient == FP32 ? floats[i] : gradient == BF16 ? float_of_bf16(halves[i]) : float_of_fp16(halves[i]);
        g *= factor;
        g += l2 != 0.0f ? l2 * p : 0.0f; /* 0 * infinity would be NaN */
        float first = kind == SGD ? 0.0f : m[i] * keep1 + g * rate1;
        if (kind != SGD) m[i] = first;
        if (kind == ADAM || kind == ADAM_AMSGRAD) {
            float second = v[i] * keep2 + (rate2 * g) * g;
            v[i] = second;
            if (kind == ADAM_AMSGRAD) { /* NaN wins on either side */
                float before = v_max[i];
                second = ((second <= before) | (before != before)) ? before : second;
                v_max[i] = second;
            }
            p = p * decay + (step * first) / (sqrtf(second) * correction + eps);
        } else {
            p += step * (kind == SGD ? g : kind == SGD_NESTEROV ? g + keep1 * first : first);
        }
        if (format == FORMAT_SPLIT) {
            uint32_t bits = quiet(bits_of(p));
            high[i] = (half_bits)((bits + 0x8000u) >> 16);
            low[i] = (int16_t)bits;
        } else {
            master[i] = p;
            if (format == FORMAT_FP16) high[i] = fp16_of_float(p);
        }
    }
}

typedef void (*range_function)(const segment *, const update_job *, int64_t, int64_t);

#define RANGE(format, gradient, kind) \
    static void range_##format##_##gradient##_##kind(const segment *s, const update_job *j, int64_t b, int64_t e) { \
        update_range(s, j, b, e, format, gradient, kind); \
    }
#define ALL_KINDS(make, format, gradient) \
    make(format, gradient, ADAM) make(format, gradient, ADAM_AMSGRAD) make(format, gradient, SGD) \
    make(format, gradient, SGD_MOMENTUM) make(format, gradient, SGD_NESTEROV)
#define ALL_GRADIENTS(make, format) \
    ALL_KINDS(make, format, BF16) ALL_KINDS(make, format, FP16) ALL_KINDS(make, format, FP32)
#define ALL(make) \
    ALL_GRADIENTS(make, FORMAT_SPLIT) ALL_GRADIENTS(make, FORMAT_FP32) ALL_GRADIENTS(make, FORMAT_FP16)
#define ENTRY(format, gradient, kind) [format][gradient][kind] = range_##format##_##gradient##_##kind,

ALL(RANGE)
static const range_function ranges[3][3][5] = {ALL(ENTRY)};

static int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

static const segment *segment_of_block(const update_job *job, int64_t block) {
    int64_t low = 0, high = job->segment_count - 1; /* the last segment that starts at or before the block */
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (job->segments[middle].first_block <= block) low = middle;
        else high = middle - 1;
    }
    return &job->segments[low];
}

static void update_block(void *argument, int64_t block) {
    const update_job *job = argument;
    const segment *s = segment_of_block(job, block);
    int64_t begin = s->begin + (block - s->first_block) * BLOCK;
    int64_t end = begin + BLOCK < s->end ? begin + BLOCK : s->end;
    ranges[job->format][job->gradient_dtype][s->kind](s, job, begin, end);
}

/* Updates all segments of a chunk. `segments[...].first_block` is filled in here. */
void protrain_update(pool *p, update_job *job, segment *segments) {
    int64_t blocks = 0;
    for (int64_t i = 0; i < job->segment_count; i++) {
        segments[i].first_block = blocks;
        blocks += blocks_of(segments[i].end - segments[i].begin);
    }
    job->segments = segments;
    pool_run(p, update_block, job, blocks);
}

/* ---- gradients: flat arrays of any of the three types --------------------------------------------------------- */

typedef struct {
    void *target;
    const void *source;
    double *sums;
    int64_t count;
    int32_t target_dtype, source_dtype;
} array_job;

typedef void (*array_function)(const array_job *, int64_t begin, int64_t end);

INLINE float load(const void *base, const int dtype, int64_t i) {
    if (dtype == FP32) return ((const float *)base)[i];
    return dtype == BF16 ? float_of_bf16(((const half_bits *)base)[i]) : float_of_fp16(((const half_bits *)base)[i]);
}

INLINE void store(void *base, const int dtype, int64_t i, float value) {
    if (dtype == FP32) ((float *)base)[i] = value;
    else ((half_bits *)base)[i] = dtype == BF16 ? bf16_of_float(value) : fp16_of_float(value);
}

INLINE void write_range(const array_job *job, int64_t begin, int64_t end, const int to, const int from, const int add) {
    void *target = job->target;
    const void *source = job->source;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        float value = load(source, from, i);
        store(target, to, i, add ? load(target, to, i) + value : value);
    }
}

INLINE void square_range(const array_job *job, int64_t begin, int64_t end, const int from) {
    const void *source = job->source;
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; i++) {
        double value = load(source, from, i);
        sum += value * value;
    }
    job->sums[begin / BLOCK] = sum;
}

#define PAIR(to, from) \
    static void accumulate_##to##_##from(const array_job *job, int64_t begin, int64_t end) { \
        write_range(job, begin, end, to, from, 1); \
    } \
    static void convert_##to##_##from(const array_job *job, int64_t begin, int64_t end) { \
        write_range(job, begin, end, to, from, 0); \
    }
#define SQUARE(from) \
    static void square_##from(const array_job *job, int64_t begin, int64_t end) { square_range(job, begin, end, from); }
#define ALL_PAIRS(make) \
    make(BF16, BF16) make(BF16, FP16) make(BF16, FP32) make(FP16, BF16) make(FP16, FP16) make(FP16, FP32) \
    make(FP32, BF16) make(FP32, FP16) make(FP32, FP32)
#define ACCUMULATE_ENTRY(to, from) [to][from] = accumulate_##to##_##from,
#define CONVERT_ENTRY(to, from) [to][from] = convert_##to##_##from,

ALL_PAIRS(PAIR)
SQUARE(BF16)
SQUARE(FP16)
SQUARE(FP32)
static const array_function accumulations[3][3] = {ALL_PAIRS(ACCUMULATE_ENTRY)};
static const array_function conversions[3][3] = {ALL_PAIRS(CONVERT_ENTRY)};
static const array_function squares[3] = {[BF16] = square_BF16, [FP16] = square_FP16, [FP32] = square_FP32};

static int64_t block_end(const array_job *job, int64_t block) {
    return (block + 1) * BLOCK < job->count ? (block + 1) * BLOCK : job->count;
}

static void accumulate_block(void *argument, int64_t block) {
    const array_job *job = argument;
    accumulations[job->target_dtype][job->source_dtype](job, block * BLOCK, block_end(job, block));
}

static void convert_block(void *argument, int64_t block) {
    const array_job *job = argument;
    conversions[job->target_dtype][job->source_dtype](job, block * BLOCK, block_end(job, block));
}

static void square_block(void *argument, int64_t block) {
    const array_job *job = argument;
    squares[job->source_dtype](job, block * BLOCK, block_end(job, block));
}

/* target += source, in fp32 per element, rounded once to the target's type. */
void protrain_accumulate(pool *p, array_job *job) { pool_run(p, accumulate_block, job, blocks_of(job->count)); }

/* target = source, rounded to nearest even. */
void protrain_convert(pool *p, array_job *job) { pool_run(p, convert_block, job, blocks_of(job->count)); }

/* The sum of squares in double precision: not finite exactly when an element is not. NaN without memory. */
double protrain_square_sum(pool *p, array_job *job) {
    int64_t blocks = blocks_of(job->count);
    double total = 0.0;
    job->sums = malloc((size_t)(blocks > 0 ? blocks : 1) * sizeof(double));
    if (job->sums == NULL) return NAN;
    pool_run(p, square_block, job, blocks);
    for (int64_t i = 0; i < blocks; i++) total += job->sums[i];
    free(job->sums);
    return total;
}

/* ---- the queue ----------------------------------------------------------------------------------------------- */

enum operation { UPDATE = 0, ACCUMULATE = 1, CONVERT = 2 };
enum stage { STAGE_CONTEXT = 0, STAGE_EVENT = 1 };
enum { CLOSED = -1, NO_MEMORY = -2, FORKED = -3 };

typedef int (*device_function)(void *argument); /* 0 for success */

typedef struct {
    void *context;
    device_function make_current, wait_for_event; /* of the driver, which wants a thread to have a context */
} device;

typedef struct queued_job {
    struct queued_job *next;
    int64_t ticket;
    int32_t operation;
    void *event; /* waited for before the job runs; NULL for none */
    union {
        update_job update;
        array_job array;
    };
    segment segments[];
} queued_job;

typedef struct {
    int64_t ticket; /* of the failed job; 0 without one */
    int32_t operation, stage, code;
} failure;

typedef struct {
    pthread_mutex_t lock; /* guards all below but the atomics */
    pthread_cond_t submitted_job, changed;
    pool *pool;
    queued_job *first, **last;
    int64_t submitted;
    atomic_int_fast64_t done;
    int32_t *flag; /* what device streams wait on, or NULL: the low 32 bits of `done` */
    device device;
    failure failure; /* the first since it was last taken */
    int closing, ended, joined;
    pid_t owner;
    pthread_t dispatcher;
} queue;

/* A job whose event failed does not run: what it would read has not arrived. */
static failure run_queued(pool *p, const device *d, queued_job *job) {
    failure result = {0, job->operation, STAGE_CONTEXT, 0};
    if (job->event != NULL) {
        if (d->make_current != NULL) result.code = d->make_current(d->context);
        if (result.code == 0) {
            result.stage = STAGE_EVENT;
            result.code = d->wait_for_event(job->event);
        }
        if (result.code != 0) {
            result.ticket = job->ticket;
            return result;
        }
    }
    if (job->operation == UPDATE) protrain_update(p, &job->update, job->segments);
    else if (job->operation == ACCUMULATE) protrain_accumulate(p, &job->array);
    else protrain_convert(p, &job->array);
    return result;
}

/* What the job wrote is visible to whoever sees its ticket in the count or in the flag. */
static void announce(queue *q, int64_t ticket) {
    if (q->flag != NULL) __atomic_store_n(q->flag, (int32_t)(uint32_t)ticket, __ATOMIC_RELEASE);
    atomic_store_explicit(&q->done, ticket, memory_order_release);
    pthread_cond_broadcast(&q->changed);
}

static void *dispatch(void *argument) {
    queue *q = argument;
    pthread_mutex_lock(&q->lock);
    while (q->first != NULL || !q->closing) {
        queued_job *job = q->first;
        if (job == NULL) {
            pthread_cond_wait(&q->submitted_job, &q->lock);
            continue;
        }
        q->first = job->next;
        if (q->first == NULL) q->last = &q->first;
        device d = q->device;
        pthread_mutex_unlock(&q->lock);
        failure result = run_queued(q->pool, &d, job);
        int64_t ticket = job->ticket;
        free(job);
        pthread_mutex_lock(&q->lock);
        if (result.ticket != 0 && q->failure.ticket == 0) q->failure = result;
        announce(q, ticket);
    }
    q->ended = 1;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
    protrain_pool_destroy(q->pool);
    return NULL;
}

static void free_queue(queue *q) {
    pthread_cond_destroy(&q->submitted_job);
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

/* A queue of jobs for a pool, which lives at least as long; NULL without memory or threads. */
queue *protrain_queue_create(pool *p) {
    queue *q = calloc(1, sizeof(queue));
    if (q == NULL) return NULL;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->submitted_job, NULL);
    pthread_cond_init(&q->changed, &clock);
    pthread_condattr_destroy(&clock);
    q->pool = p;
    q->last = &q->first;
    q->owner = getpid();
    atomic_fetch_add(&p->users, 1);
    if (start_thread(&q->dispatcher, dispatch, q) == 0) return q;
    atomic_fetch_sub(&p->users, 1);
    free_queue(q);
    return NULL;
}

/* Lets jobs wait for a device's events and its streams for jobs. `flag`, which may be NULL, outlives the queue and
 * every stream that waits on it; events of jobs submitted from now on belong to this device. */
void protrain_queue_attach(
    queue *q, int32_t *flag, void *context, device_function make_current, device_function wait_for_event) {
    pthread_mutex_lock(&q->lock);
    q->device = (device){context, make_current, wait_for_event};
    q->flag = flag;
    if (flag != NULL) __atomic_store_n(flag, (int32_t)(uint32_t)atomic_load(&q->done), __ATOMIC_RELEASE);
    pthread_mutex_unlock(&q->lock);
}

static int64_t enqueue(queue *q, queued_job *job) {
    pthread_mutex_lock(&q->lock);
    int64_t ticket = q->closing ? CLOSED : ++q->submitted;
    if (ticket > 0) {
        job->ticket = ticket;
        *q->last = job;
        q->last = &job->next;
        pthread_cond_signal(&q->submitted_job);
    }
    pthread_mutex_unlock(&q->lock);
    if (ticket < 0) free(job);
    return ticket;
}

/* Submits an update; the job and its segments are copied. Returns its ticket, or a negative number. */
int64_t protrain_queue_update(queue *q, const update_job *update, const segment *segments, void *event) {
    if (q->owner != getpid()) return FORKED;
    size_t table_bytes = (size_t)update->segment_count * sizeof(segment);
    queued_job *job = calloc(1, sizeof(queued_job) + table_bytes);
    if (job == NULL) return NO_MEMORY;
    job->operation = UPDATE;
    job->event = event;
    job->update = *update;
    memcpy(job->segments, segments, table_bytes);
    return enqueue(q, job);
}

/* Submits ACCUMULATE or CONVERT. Returns its ticket, or a negative number. */
int64_t protrain_queue_array(queue *q, int operation, const array_job *array, void *event) {
    if (q->owner != getpid()) return FORKED;
    queued_job *job = calloc(1, sizeof(queued_job));
    if (job == NULL) return NO_MEMORY;
    job->operation = operation;
    job->event = event;
    job->array = *array;
    return enqueue(q, job);
}

int64_t protrain_queue_submitted(queue *q) {
    if (q->owner != getpid()) return q->submitted;
    pthread_mutex_lock(&q->lock);
    int64_t submitted = q->submitted;
    pthread_mutex_unlock(&q->lock);
    return submitted;
}

/* The ticket of the last job that was run or failed. */
int64_t protrain_queue_done(const queue *q) { return atomic_load_explicit(&q->done, memory_order_acquire); }

static struct timespec deadline_after(int64_t milliseconds) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += (milliseconds % 1000) * 1000000;
    at.tv_sec += milliseconds / 1000 + at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    return at;
}

/* Waits for a ticket. Returns 1 when it is done, 0 when the time has passed, FORKED where it never will be. */
int protrain_queue_wait(queue *q, int64_t ticket, int64_t milliseconds) {
    if (protrain_queue_done(q) >= ticket) return 1;
    if (q->owner != getpid()) return FORKED;
    struct timespec deadline = deadline_after(milliseconds);
    pthread_mutex_lock(&q->lock);
    while (q->done < ticket && pthread_cond_timedwait(&q->changed, &q->lock, &deadline) == 0) {}
    int done = q->done >= ticket;
    pthread_mutex_unlock(&q->lock);
    return done;
}

/* Takes the first failure since the last call; its ticket is 0 if there was none. */
failure protrain_queue_take_failure(queue *q) {
    failure taken = {0, 0, 0, 0};
    if (q->owner != getpid()) return taken;
    pthread_mutex_lock(&q->lock);
    taken = q->failure;
    q->failure.ticket = 0;
    pthread_mutex_unlock(&q->lock);
    return taken;
}

/* Takes no more jobs and waits until all have run. Returns 1 when the dispatcher has ended, 0 when the time has
 * passed: it goes on then, and what its jobs use must stay. */
int protrain_queue_end(queue *q, int64_t milliseconds) {
    if (q->owner != getpid()) return 1;
    struct timespec deadline = deadline_after(milliseconds);
    pthread_mutex_lock(&q->lock);
    q->closing = 1;
    pthread_cond_signal(&q->submitted_job);
    while (!q->ended && pthread_cond_timedwait(&q->changed, &q->lock, &deadline) == 0) {}
    int ended = q->ended, join = ended && !q->joined;
    if (join) q->joined = 1;
    pthread_mutex_unlock(&q->lock);
    if (join) pthread_join(q->dispatcher, NULL);
    return ended;
}

/* Gives the memory of a queue back that has ended. */
void protrain_queue_release(queue *q) {
    if (q->owner == getpid() && q->joined) free_queue(q);
}

/* ---- measurement --------------------------------------------------------------------------------------------- */

static void scale_block(void *argument, int64_t block) {
    const array_job *job = argument;
    float *values = job->target;
    int64_t end = block_end(job, block);
    for (int64_t i = block * BLOCK; i < end; i++) values[i] *= 0x1.fffffep-1f;
}

/* Reads and writes every fp32 of target once, as an update does: what bounds an update is measured with this. */
void protrain_scale(pool *p, array_job *job) { pool_run(p, scale_block, job, blocks_of(job->count)); }
