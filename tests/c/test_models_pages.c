/* Pages of a load: each page of the weights file is read at most once, and released once its matrix is packed. */
#include "base/sys.h"

#ifdef MP_SEAM

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/options.h"
#include "parts_fixture.h"
#include "models/decoder/decoder.h"

/* --- the weights file: a page without access counts its next use --- */

enum { PAGES_MAX = 8192 };
static uint8_t *file_data;
static size_t file_bytes, page;
static _Atomic bool closed_page[PAGES_MAX];
static _Atomic int uses[PAGES_MAX];
static _Atomic int fetches[PAGES_MAX]; /* times that the kernel was told to read the page */

static void use_page(size_t at) {
    if (atomic_exchange(&closed_page[at], false))
        atomic_fetch_add(&uses[at], 1);
    mprotect(file_data + at * page, page, PROT_READ);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    size_t at = (size_t)((uint8_t *)info->si_addr - file_data);
    if (!file_data || at >= file_bytes) {
        signal(number, SIG_DFL);
        return; /* the instruction runs again and ends the process */
    }
    use_page(at / page);
}

static void close_pages(size_t from, size_t bytes) {
    mprotect(file_data + from, bytes, PROT_NONE);
    for (size_t at = from / page; at * page < from + bytes; at++)
        atomic_store(&closed_page[at], true);
}

static void *watched_mmap(size_t bytes, int fd) {
    void *data = mp_sys_real.mmap(bytes, fd);
    MP_CHECK(data != MAP_FAILED && !file_data && bytes <= PAGES_MAX * page);
    file_data = data;
    file_bytes = bytes;
    close_pages(0, bytes);
    return data;
}

/* --- advice --- */

static _Atomic int huge_calls;
static uint8_t *huge_begin;
static size_t huge_bytes;

static int watched_madvise(void *data, size_t bytes, int advice) {
    size_t from = (size_t)((uint8_t *)data - file_data);
    bool of_file = file_data && from < file_bytes;
    int result = mp_sys_real.madvise(data, bytes, advice);
    if (of_file && advice == MADV_DONTNEED)
        close_pages(from, bytes);
    else if (of_file && advice != MADV_WILLNEED) /* MADV_POPULATE_READ */
        for (size_t at = from / page; at * page < from + bytes; at++) {
            use_page(at);
            atomic_fetch_add(&fetches[at], 1);
        }
    else if (advice == MADV_HUGEPAGE) {
        atomic_fetch_add(&huge_calls, 1);
        huge_begin = data;
        huge_bytes = bytes;
    }
    return result;
}

static void start_load(tiny_model *tiny, mp_spec *spec, mp_compute compute, const char *pack_on_use_mb,
                       int (*advise)(void *data, size_t bytes, int advice)) {
    mp_error error;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    page = (size_t)sysconf(_SC_PAGESIZE);
    setenv("MPOOL_PACK_ON_USE_MB", pack_on_use_mb, 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
    sigaction(SIGSEGV, &action, NULL);
    mp_sys_table.mmap = watched_mmap;
    mp_sys_table.madvise = advise;
    tiny_load(tiny, spec, compute, 3);
}

static void load(tiny_model *tiny, mp_spec *spec, mp_compute compute, const char *pack_on_use_mb) {
    start_load(tiny, spec, compute, pack_on_use_mb, watched_madvise);
    if (strcmp(pack_on_use_mb, "0") == 0)
        tiny_wait_until_fetched(&((mp_decoder *)tiny->model)->store);
}

/* Every page was read at most once, and most were read: loads that read nothing would pass otherwise. */
static void check_pages(void) {
    size_t pages = (file_bytes + page - 1) / page, read = 0;
    for (size_t at = 0; at < pages; at++) {
        if (atomic_load(&uses[at]) > 1)
            MP_FAIL("page %zu of %zu was read %d times", at, pages, atomic_load(&uses[at]));
        read += (size_t)atomic_load(&uses[at]);
    }
    MP_CHECK(pages > 10 && read > pages / 2);
}

static const mp_dtype quantised[] = {MP_Q8_0, MP_Q4_0, MP_Q4_K, MP_Q6_K};
static const mp_dtype floats[] = {MP_F32};

MP_TEST(models_pages_of_packed_floats_are_read_once) {
    tiny_model tiny;
    load(&tiny, tiny_decoder_spec(floats, 1, 5), MP_COMPUTE_BF16, "1048576");
    check_pages();
    tiny_unload(&tiny);
}

MP_TEST(models_pages_of_packed_quantised_weights_are_read_once) {
    tiny_model tiny;
    load(&tiny, tiny_decoder_spec(quantised, 4, 5), MP_COMPUTE_AUTO, "1048576");
    check_pages();
    tiny_unload(&tiny);
}

MP_TEST(models_pages_of_mapped_weights_are_read_once) {
    tiny_model tiny;
    load(&tiny, tiny_decoder_spec(quantised, 4, 5), MP_COMPUTE_AUTO, "0");
    check_pages();
    tiny_unload(&tiny);
}

MP_TEST(models_pages_of_an_encoder_are_read_once) {
    tiny_model tiny;
    load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_AUTO, "1048576");
    check_pages();
    tiny_unload(&tiny);
}

/* Whole pages of an expert's matrix are released once all its panels are kept, and pages of other experts are not. */
MP_TEST(models_pages_of_kept_experts_are_released) {
    tiny_model tiny;
    tiny_job job;
    int32_t prompt[70];
    int checked = 0;
    load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "qwen3moe", .experts = 6}, quantised, 1,
                                     5, -1), MP_COMPUTE_AUTO, "1048576");
    for (int i = 0; i < 70; i++)
        prompt[i] = i * 7 % TINY_VOCAB;
    mp_text_args args = {.n_prompt = 70, .prompt = prompt, .n_choices = 1,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1,
                                      .ignore_eos = true}};
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    tiny_job_finish(&tiny, &job);
    mp_request_destroy(&job.call->base);
    const mp_decoder *model = (const mp_decoder *)tiny.model;
    for (int l = 0; l < TINY_LAYERS; l++)
        for (int e = 0; e < 6; e++) {
            const mp_expert_matrix *matrix = &mp_layer_ffn(&model->layers[l], 0)->experts.up;
            const size_t from = (size_t)(matrix->tensors[e].data - file_data), end = from + matrix->tensors[e].nbytes;
            if (atomic_load(&matrix->packed->left[e]) > 0)
                continue;
            for (size_t at = (from + page - 1) / page; (at + 1) * page <= end; at++, checked++)
                MP_CHECK(atomic_load(&closed_page[at]) && atomic_load(&uses[at]) > 0);
        }
    MP_CHECK(checked > 10);
    tiny_unload(&tiny);
}

/* --- the thread that fetches --- */

enum { FETCH_CHUNK = 4 << 20, FETCHED_MAX = 4 };

/* A load gives back the source pages of every tensor that it copies: of a small matrix, which one thread packs, of a
 * large one, which all threads pack together, and of a matrix that stays in floats. */
MP_TEST(models_pages_of_copied_tensors_are_released) {
    enum { TENSORS = 3, SMALL = 256, LARGE = 2048, COLUMNS = 1024 };
    static const struct {
        const char *name;
        int rows, columns;
    } tensors[TENSORS] = {{"small", SMALL, SMALL}, {"large", LARGE, COLUMNS}, {"plain", SMALL, SMALL}};
    tiny_parts parts;
    mp_linear small = {0}, large = {0};
    mp_error error;
    float *plain;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    page = (size_t)sysconf(_SC_PAGESIZE);
    tiny_parts_begin(&parts, "parts.bin", 3);
    for (int t = 0; t < TENSORS; t++)
        tiny_tensor(&parts.file, tensors[t].name, MP_F32, tensors[t].rows, tensors[t].columns, 1, 0);
    sigaction(SIGSEGV, &action, NULL);
    mp_sys_table.mmap = watched_mmap;
    mp_sys_table.madvise = watched_madvise;
    tiny_parts_open(&parts, MP_COMPUTE_F32, 2);
    MP_CHECK_OK(mp_builder_linear(&parts.builder, &small, "small", NULL, SMALL, SMALL, &error), &error);
    MP_CHECK_OK(mp_builder_linear(&parts.builder, &large, "large", NULL, LARGE, COLUMNS, &error), &error);
    MP_CHECK_OK(mp_builder_plain(&parts.builder, &plain, "plain", SMALL, SMALL, &error), &error);
    tiny_parts_finish(&parts);
    for (int t = 0; t < TENSORS; t++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(parts.file.spec, t);
        for (size_t at = entry->offset / page + 1; (at + 1) * page < entry->offset + entry->nbytes; at++)
            if (atomic_load(&uses[at]) != 1 || !atomic_load(&closed_page[at]))
                MP_FAIL("page %zu of `%s` was read %d times and %s", at, tensors[t].name, atomic_load(&uses[at]),
                        atomic_load(&closed_page[at]) ? "released" : "not released");
    }
    mp_free(parts.store.slab);
    parts.store.slab = NULL;
    mp_sys_table = mp_sys_real;
    tiny_parts_close(&parts);
}

#endif
