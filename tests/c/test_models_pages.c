/* Pages of a load: each page of the weights file is read at most once, and packed weights lie in huge pages. */
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

/* Returns true if the mapping at this address has a flag of smaps: " hg" if the kernel was told to use huge pages for
 * it, " nh" if it was told not to. */
static bool has_flag(const void *address, const char *flag) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false, found = false;
    MP_CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
            inside = (uintptr_t)address >= begin && (uintptr_t)address < end;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            found = strstr(line, flag) != NULL;
    }
    fclose(maps);
    return found;
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
        tiny_wait_until_fetched(((mp_decoder *)tiny->model)->stored);
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

/* Matrices that stay in the file are fetched after the load, so that the first steps do not wait for them page by page:
 * every page with a byte of these matrices, and no other. A page that matrices share is read for each of them. */
MP_TEST(models_pages_of_stored_weights_are_fetched) {
    tiny_model tiny;
    load(&tiny, tiny_decoder_spec(quantised, 4, 5), MP_COMPUTE_AUTO, "0");
    const mp_stored *stored = ((mp_decoder *)tiny.model)->stored;
    static int expected[PAGES_MAX];
    size_t most = 0;
    for (int i = 0; i < stored->count; i++) {
        const mp_tensor *tensor = &stored->parts[i].tensor;
        size_t from = (size_t)((uint8_t *)tensor->data - file_data), end = from + tensor->nbytes;
        for (size_t at = from / page; at * page < end; at++, most++)
            expected[at]++;
    }
    MP_CHECK(most > 10);
    for (size_t at = 0; at < PAGES_MAX; at++)
        if (atomic_load(&fetches[at]) != expected[at])
            MP_FAIL("page %zu was fetched %d times, expected %d", at, atomic_load(&fetches[at]), expected[at]);
    tiny_unload(&tiny);
}

MP_TEST(models_pages_of_packed_weights_are_not_fetched) {
    tiny_model tiny;
    load(&tiny, tiny_decoder_spec(quantised, 4, 5), MP_COMPUTE_AUTO, "1048576");
    for (size_t at = 0; at < PAGES_MAX; at++)
        MP_CHECK_INT(atomic_load(&fetches[at]), 0);
    tiny_unload(&tiny);
}

/* Memory for copies is reserved as a whole, in huge pages, and used in the order of first use. */
MP_TEST(models_pages_of_kept_experts_are_huge) {
    mp_budget budget = {.limit = UINT64_MAX};
    mp_wmat w;
    mp_wmat_init(&w, MP_W_F32, 2048, 2048);
    mp_packed_experts *experts = mp_packed_experts_create(NULL, &budget);
    mp_packed_matrix *matrix = mp_packed_experts_add(experts, &w, 2);
    MP_CHECK(matrix != NULL);
    MP_CHECK_INT(budget.used, 0);
    MP_CHECK(mp_packed_wants(matrix, 1, 0, false));
    MP_CHECK_INT((uintptr_t)mp_packed_panel(matrix, 1, 0) % MP_HUGE_PAGE, 0);
    if (access("/sys/kernel/mm/transparent_hugepage/enabled", F_OK) == 0)
        MP_CHECK(has_flag(mp_packed_panel(matrix, 1, 0), " hg"));
    MP_CHECK_INT(budget.used, matrix->bytes);
    mp_packed_experts_destroy(experts);
    MP_CHECK_INT(budget.used, 0);
}

/* Whole pages of an expert's matrix are released once all its panels are kept, and pages of other experts are not. */
MP_TEST(models_pages_of_kept_experts_are_released) {
    tiny_model tiny;
    tiny_job job;
    int32_t prompt[70];
    int checked = 0;
    load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "qwen3moe", .head_norms = true, .experts = 6}, quantised, 1,
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

/* Large matrices are fetched in chunks: the end of the model waits for one of them at most. */
static _Atomic size_t longest_fetch, calls_of_fetch;

static int noted_madvise(void *data, size_t bytes, int advice) {
    size_t from = (size_t)((uint8_t *)data - file_data), longest = atomic_load(&longest_fetch);
    (void)advice;
    while (bytes > longest && !atomic_compare_exchange_weak(&longest_fetch, &longest, bytes)) {
    }
    atomic_fetch_add(&calls_of_fetch, 1);
    for (size_t at = from / page; at * page < from + bytes; at++)
        atomic_fetch_add(&fetches[at], 1);
    return 0;
}

enum { FETCH_CHUNK = 4 << 20, FETCHED_MAX = 4 };

/* Fetches matrices of these sizes, one after the other from byte `offset` of a page on, in chunks. The addresses are
 * numbers only: no memory is mapped there. Checks that every page of each matrix is fetched once, and no other page. */
static void check_chunks(const size_t *sizes, int count, size_t offset, int expected_calls) {
    static int expected[PAGES_MAX];
    const mp_wmat w = {.panels = 1};
    mp_stored_part *part;
    mp_error error;
    size_t at = offset;
    mp_stored *stored;
    MP_CHECK_OK(mp_stored_create(NULL, FETCHED_MAX, false, &stored, &error), &error);
    page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < count; i++) {
        mp_tensor tensor = {.data = (void *)(((uintptr_t)1 << 30) + at), .nbytes = sizes[i]};
        MP_CHECK_OK(mp_stored_add(stored, &w, &tensor, &part, &error), &error);
        for (size_t p = at / page; p * page < at + sizes[i]; p++)
            expected[p]++;
        at += sizes[i];
    }
    MP_CHECK(at < PAGES_MAX * page);
    file_data = (uint8_t *)((uintptr_t)1 << 30);
    mp_sys_table.madvise = noted_madvise;
    mp_stored_fetch(stored);
    tiny_wait_until_fetched(stored);
    mp_sys_table.madvise = mp_sys_real.madvise;
    MP_CHECK(atomic_load(&longest_fetch) <= FETCH_CHUNK);
    MP_CHECK_INT(atomic_load(&calls_of_fetch), expected_calls);
    for (size_t p = 0; p < PAGES_MAX; p++)
        if (atomic_load(&fetches[p]) != expected[p])
            MP_FAIL("page %zu was fetched %d times, expected %d", p, atomic_load(&fetches[p]), expected[p]);
    mp_stored_destroy(stored);
}

/* Chunks end at multiples of their size, so a matrix that begins between two of them has one more. */
MP_TEST(models_pages_of_large_matrices_are_fetched_in_chunks) {
    const size_t sizes[] = {2 * FETCH_CHUNK + 65536, 65536, FETCH_CHUNK, FETCH_CHUNK - 2 * 65536};
    check_chunks(sizes, 4, 0, 3 + 1 + 2 + 1);
    MP_CHECK_INT(atomic_load(&longest_fetch), FETCH_CHUNK);
}

/* The data of a matrix begins anywhere in a page: the pages at the ends of its chunks are fetched too. */
MP_TEST(models_pages_of_unaligned_matrices_are_fetched) {
    const size_t sizes[] = {2 * FETCH_CHUNK + 5000, 200, FETCH_CHUNK + 1, FETCH_CHUNK - 1};
    check_chunks(sizes, 4, 100, 3 + 1 + 2 + 2);
}

MP_TEST(models_pages_of_a_matrix_that_ends_with_a_chunk_are_fetched) {
    const size_t sizes[] = {FETCH_CHUNK - 32, FETCH_CHUNK};
    check_chunks(sizes, 2, 32, 1 + 1);
}

static _Atomic bool gate_is_open;

/* A disk that gives nothing until the gate opens. */
static int slow_madvise(void *data, size_t bytes, int advice) {
    const bool reads = advice != MADV_DONTNEED && advice != MADV_WILLNEED && advice != MADV_HUGEPAGE;
    while (reads && !atomic_load(&gate_is_open))
        usleep(100);
    return watched_madvise(data, bytes, advice);
}

/* A load does not wait for the disk. Passes count as warming up until the last page is read: also those of mapped
 * weights, which never pack. */
MP_TEST(models_pages_of_a_slow_disk_do_not_delay_a_load) {
    tiny_model tiny;
    start_load(&tiny, tiny_decoder_spec(quantised, 4, 5), MP_COMPUTE_AUTO, "0", slow_madvise);
    mp_stored *stored = ((mp_decoder *)tiny.model)->stored;
    MP_CHECK(atomic_load(&stored->fetching) && mp_stored_warming(stored));
    stored->mapped = true;
    MP_CHECK(mp_stored_warming(stored));
    atomic_store(&gate_is_open, true);
    tiny_wait_until_fetched(stored);
    MP_CHECK(!mp_stored_warming(stored));
    stored->mapped = false;
    MP_CHECK(mp_stored_warming(stored));
    tiny_unload(&tiny);
}

static mp_stored *ending;

static int madvise_until_the_end(void *data, size_t bytes, int advice) {
    while (!atomic_load(&ending->quit))
        usleep(100);
    return noted_madvise(data, bytes, advice);
}

/* The end of a model waits for the chunk that is being read, and no other chunk is read afterwards. */
MP_TEST(models_pages_are_not_fetched_after_the_end) {
    const mp_wmat w = {.panels = 1};
    mp_stored_part *part;
    mp_error error;
    page = (size_t)sysconf(_SC_PAGESIZE);
    file_data = (uint8_t *)((uintptr_t)1 << 30);
    mp_tensor tensor = {.data = file_data, .nbytes = 3 * FETCH_CHUNK};
    MP_CHECK_OK(mp_stored_create(NULL, 1, false, &ending, &error), &error);
    MP_CHECK_OK(mp_stored_add(ending, &w, &tensor, &part, &error), &error);
    mp_sys_table.madvise = madvise_until_the_end;
    mp_stored_fetch(ending);
    mp_stored_destroy(ending);
    mp_sys_table.madvise = mp_sys_real.madvise;
    MP_CHECK(atomic_load(&calls_of_fetch) <= 1);
}

static mp_stored_part *packed_meanwhile;

/* Packs the last panel of a matrix while its only chunk is read. */
static int packing_madvise(void *data, size_t bytes, int advice) {
    const int result = slow_madvise(data, bytes, advice);
    if (packed_meanwhile && (uintptr_t)data <= (uintptr_t)packed_meanwhile->tensor.data &&
        (uintptr_t)data + page > (uintptr_t)packed_meanwhile->tensor.data && advice != MADV_DONTNEED)
        atomic_store(&packed_meanwhile->left, 0);
    return result;
}

/* A matrix whose last panel is packed while its pages are fetched: the pages are released after the fetch. */
MP_TEST(models_pages_of_a_matrix_that_was_packed_meanwhile_are_released) {
    tiny_model tiny;
    start_load(&tiny, tiny_decoder_spec(quantised, 4, 5), MP_COMPUTE_AUTO, "0", packing_madvise);
    mp_stored *stored = ((mp_decoder *)tiny.model)->stored;
    mp_stored_part *part = &stored->parts[stored->count - 1];
    const int32_t left = atomic_load(&part->left);
    packed_meanwhile = part;
    atomic_store(&gate_is_open, true);
    tiny_wait_until_fetched(stored);
    MP_CHECK_INT(atomic_load(&part->left), 0);
    const size_t from = (size_t)((uint8_t *)part->tensor.data - file_data), end = from + part->tensor.nbytes;
    size_t first = (from + page - 1) / page, whole = end / page;
    MP_CHECK(first < whole);
    for (size_t at = first; at < whole; at++)
        MP_CHECK(atomic_load(&closed_page[at]) && atomic_load(&uses[at]) == 1);
    atomic_store(&part->left, left);
    tiny_unload(&tiny);
}

/* A forked child has no fetching thread, and does not wait for one. */
MP_TEST(models_pages_of_a_forked_child_are_not_fetched) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    MP_SKIP("sanitizers do not follow a fork of a process with threads");
#endif
    tiny_model tiny;
    start_load(&tiny, tiny_decoder_spec(quantised, 4, 5), MP_COMPUTE_AUTO, "0", slow_madvise);
    mp_stored *stored = ((mp_decoder *)tiny.model)->stored;
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        const bool warming = atomic_load(&stored->fetching);
        mp_stored_destroy(stored);
        _exit(warming ? 1 : 0);
    }
    int status;
    MP_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    MP_CHECK_INT(WEXITSTATUS(status), 0);
    MP_CHECK(atomic_load(&stored->fetching));
    atomic_store(&gate_is_open, true);
    tiny_unload(&tiny);
}

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
    mp_free(parts.builder.slab);
    parts.builder.slab = NULL;
    mp_sys_table = mp_sys_real;
    tiny_parts_close(&parts);
}

/* One request covers all packed weights, in one mapping that starts at a huge page. */
MP_TEST(models_pages_of_packed_weights_are_huge) {
    enum { HUGE_PAGE = 2 << 20 };
    tiny_model tiny;
    load(&tiny, tiny_decoder_spec(floats, 1, 5), MP_COMPUTE_F32, "1048576");
    size_t charged = tiny.model->ops->bytes(tiny.model);
    MP_CHECK_INT(huge_calls, 1);
    MP_CHECK(huge_bytes <= charged && huge_bytes + 2 * page > charged);
    if (access("/sys/kernel/mm/transparent_hugepage/enabled", F_OK) == 0)
        MP_CHECK(has_flag(huge_begin, " hg"));
#if !defined(__SANITIZE_ADDRESS__)
    MP_CHECK_INT((uintptr_t)(huge_begin - page) % HUGE_PAGE, 0); /* the first page has the header of mp_alloc */
#endif
    tiny_unload(&tiny);
}

#endif
