/* The handler's functions of runtime.c without a signal, under sanitizers.
 *
 * hostile SEED COUNT FOLDER: notes with damaged tables, and faults at any address. A note lies
 * before an inaccessible page, so whatever reads behind it dies; and what comes back must be in a
 * hole of the library.
 * race FOLDER: eight threads bring the same pages back, and change the program's handler meanwhile.
 * tries FOLDER: a thread that is never the first at a page, and one whose fault stays.
 */
#define constructor unused /* begin() would take the signal from the sanitizer */
#include "../../../../pytest_negativa/spare/runtime.c"
#undef constructor

#include <stdio.h>

enum { PAGES = 64, ORIGINAL = (PAGES + 8) * PAGE, NOTE_ROOM = 4 * PAGE };

static struct link_map fake_map;
static ElfW(Dyn) fake_dynamic[2];
static char *library_base; /* pages of holes, then the note's pages, then one without access */

static int find_fake(void *address, struct dl_find_object *found) {
    uintptr_t base = (uintptr_t)library_base;
    if ((uintptr_t)address - base >= PAGES * PAGE + NOTE_ROOM) return -1;
    *found = (struct dl_find_object){
        .dlfo_link_map = &fake_map,
        .dlfo_map_start = library_base,
        .dlfo_map_end = library_base + PAGES * PAGE + NOTE_ROOM,
    };
    return 0;
}

static void check(bool right, const char *what) {
    if (right) return;
    printf("%s\n", what);
    exit(1);
}

static uint64_t state;

static uint64_t any(void) { /* xorshift64 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static uint64_t below(uint64_t limit) { return any() % limit; }

/* The byte that the spare has everywhere in a page. */
static char content(uint64_t page) { return (char)(page * 7 + 1); }

static void write_spare(const char *folder) {
    char path[PATH_MAX], page[PAGE];
    snprintf(path, sizeof path, "%s/spare", folder);
    FILE *file = fopen(path, "w");
    check(file != NULL, "no spare");
    for (int i = 0; i < ORIGINAL / PAGE; i++) {
        memset(page, content(i), PAGE);
        fwrite(page, PAGE, 1, file);
    }
    Trailer trailer = {.version = VERSION, .original_size = ORIGINAL};
    memcpy(trailer.magic, MAGIC, 8);
    fwrite(&trailer, sizeof trailer, 1, file);
    fclose(file);
}

/* A library with eight holes of pages 2 and 5 of each eight, at its note's place `at`. */
static Note *write_note(size_t at, const char *folder) {
    char *place = library_base + PAGES * PAGE + at;
    Note *note = (Note *)place;
    memset(note, 0, sizeof *note);
    memcpy(note->magic, MAGIC, 8);
    note->version = VERSION;
    note->original_size = ORIGINAL;
    note->holes = sizeof *note;
    note->hole_count = 8;
    Hole *holes = (Hole *)(place + note->holes);
    for (uint64_t i = 0; i < 8; i++)
        holes[i] = (Hole){(8 * i + 2) * PAGE, (8 * i + 6) * PAGE, (8 * i + 10) * PAGE, PROT_READ, 0};
    uint32_t end = (uint32_t)(sizeof *note + 8 * sizeof *holes);
    const char *texts[] = {"libfake.so", "spare", folder, "Help."};
    uint32_t *offsets[] = {&note->name, &note->spare, &note->folders, &note->remedy};
    for (int i = 0; i < 4; i++) {
        *offsets[i] = end;
        strcpy(place + end, texts[i]);
        end += (uint32_t)strlen(texts[i]) + 1;
        if (i == 2) place[end++] = 0;
    }
    fake_dynamic[0] = (ElfW(Dyn)){DT_NEGATIVA_NOTE, {(uintptr_t)(place - library_base)}};
    return note;
}

static void make_library(void) {
    size_t size = PAGES * PAGE + NOTE_ROOM;
    library_base = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(library_base != MAP_FAILED, "no memory");
    mprotect(library_base + PAGES * PAGE, NOTE_ROOM, PROT_READ | PROT_WRITE);
    fake_map.l_addr = (uintptr_t)library_base;
    fake_map.l_name = library_base + PAGES * PAGE; /* a text at the start of the note's pages */
    strcpy(fake_map.l_name, "/libfake.so");
    fake_map.l_ld = fake_dynamic;
    find_object = find_fake;
    entered = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* The state before the first miss. */
static void forget(void) {
    mmap(library_base, PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    for (uint32_t i = 0; i < MAX_LIBRARIES && i < library_count; i++) {
        Library *library = &libraries[i];
        if (library->reserve) munmap((void *)library->reserve, ORIGINAL);
        if (library->log) munmap((char *)library->log - PAGE, PAGE + ORIGINAL / PAGE * 4);
        memset(library, 0, sizeof *library);
    }
    library_count = all_misses = 0;
}

/* ---- hostile ---- */

static uint64_t odd_number(uint64_t old) {
    switch (below(6)) {
    case 0: return any();
    case 1: return old + (any() & 1 ? 1 : -1);
    case 2: return old + (any() & 1 ? PAGE : -PAGE);
    case 3: return below(PAGES + 16) * PAGE;
    case 4: return (uint64_t)1 << below(64);
    default: return old ^ (uint64_t)1 << below(64);
    }
}

/* Of the note; in pages that can be read, or outside the library. */
static uint64_t odd_place(uint64_t old) {
    uint64_t place = odd_number(old);
    return place < PAGES * PAGE ? place + PAGES * PAGE : place;
}

static void damage(char *start, size_t size) {
    size_t at = below(size / 4) * 4;
    uint64_t value = 0;
    size_t width = at % 8 == 0 && at + 8 <= size && any() & 1 ? 8 : 4;
    memcpy(&value, start + at, width);
    value = odd_number(value);
    memcpy(start + at, &value, width);
}

/* Whether the note says so, by another way than hole_at. */
static bool is_right(const Note *note, uint64_t address) {
    const Hole *holes = (const Hole *)((const char *)note + note->holes);
    for (uint32_t i = 0; i < note->hole_count; i++) {
        if (address < holes[i].start || address >= holes[i].end) continue;
        uint64_t offset = holes[i].offset + address / PAGE * PAGE - holes[i].start;
        return offset < ORIGINAL && library_base[address] == content(offset / PAGE);
    }
    return false;
}

static void hostile(unsigned long seed, long count, const char *folder) {
    char spare[PATH_MAX];
    snprintf(spare, sizeof spare, "%s/spare", folder);
    int file = open(spare, O_RDWR);
    long served = 0;
    state = seed * 2 + 1;
    for (long input = 0; input < count; input++) {
        forget();
        memset(library_base + PAGES * PAGE + PAGE, 'x', NOTE_ROOM - PAGE);
        size_t texts = 4 + strlen("libfake.so") + 1 + strlen("spare") + 1 + strlen(folder) + 2 + 6;
        size_t size = (sizeof(Note) + 8 * sizeof(Hole) + texts + 7) / 8 * 8;
        Note *note = write_note(any() & 1 ? NOTE_ROOM - size : PAGE, folder);
        memset((char *)note + size - 4, 'x', 4); /* nothing ends a text that lost its end */
        Trailer trailer = {.version = VERSION, .original_size = ORIGINAL}, bad;
        memcpy(trailer.magic, MAGIC, 8);
        bad = trailer;
        for (uint64_t i = below(4); i; i--) damage((char *)note, size);
        if (below(8) == 0) damage((char *)&bad, sizeof bad);
        if (below(8) == 0) fake_dynamic[0].d_un.d_val = odd_place(fake_dynamic[0].d_un.d_val);
        check(pwrite(file, &bad, sizeof bad, ORIGINAL) == sizeof bad, "no trailer");
        for (int i = 0; i < 12; i++) {
            uint64_t address = below(PAGES * PAGE);
            unsigned long error = (unsigned long[]){4, 4, 20, 6, 36}[below(5)];
            if (!bring_back((uintptr_t)library_base + address, error, SEGV_ACCERR)) continue;
            served++;
            check(is_right(note, address), "wrong page");
        }
    }
    printf("%ld inputs, %ld pages\n", count, served);
}

/* ---- race ---- */

enum { THREADS = 8, ROUNDS = 200 };

static pthread_barrier_t barrier;
static char spare_path[PATH_MAX], away_path[PATH_MAX];

static void *race(void *own) {
    long number = (long)own;
    uint64_t seed = (uint64_t)number * 88172645463325252u + 1;
    for (int turn = 0; turn < ROUNDS; turn++) {
        if (number == 0) {
            forget();
            if (turn % 4 == 3) rename(spare_path, away_path);
        }
        pthread_barrier_wait(&barrier);
        for (int i = 0; i < 400; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            uint64_t page = (seed >> 33) % PAGES, address = page * PAGE + i;
            bool hole = page % 8 >= 2 && page % 8 < 6;
            if (i == 200 && number == 0 && turn % 4 == 3) rename(away_path, spare_path);
            bool back = bring_back((uintptr_t)library_base + address, 4, SEGV_ACCERR);
            check(back == hole || (!back && turn % 4 == 3), "another answer");
            if (back) check(library_base[address] == content(page + 8), "wrong bytes");
            if (i % 16 == turn % 16) { /* less than FAULTS_PLACES of all threads in a turn */
                struct sigaction action = {.sa_handler = (__sighandler_t)(0x1000 + number)}, old;
                action.sa_restorer = (void (*)(void))action.sa_handler;
                faults_sigaction(SIGSEGV, &action, &old);
                check((void *)old.sa_handler == (void *)old.sa_restorer, "half a handler");
            }
        }
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

/* ---- tries ---- */

static void tries(void) {
    for (int i = 0; i < 1000; i++, all_misses++) check(try_again(0x7f0000001000), "gave up");
    for (int i = 0; i < 100; i++) check(try_again(0x7f0000001000), "gave up early");
    check(!try_again(0x7f0000001000), "tries for ever");
    puts("done");
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    const char *folder = arguments[count - 1];
    if (strcmp(arguments[1], "tries") == 0) {
        tries();
        return 0;
    }
    static char logs[PATH_MAX];
    snprintf(logs, sizeof logs, "%s/logs", folder);
    mkdir(logs, 0777);
    log_folder = logs;
    struct rlimit limit = {1 << 20, 1 << 20}; /* a damaged size must not fill the disk */
    setrlimit(RLIMIT_FSIZE, &limit);
    make_library();
    write_spare(folder);
    if (count == 5) {
        hostile(strtoul(arguments[2], NULL, 10), atol(arguments[3]), folder);
        return 0;
    }
    write_note(PAGE, folder);
    snprintf(spare_path, sizeof spare_path, "%s/spare", folder);
    snprintf(away_path, sizeof away_path, "%s/away", folder);
    pthread_barrier_init(&barrier, NULL, THREADS);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, race, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    puts("done");
    return 0;
}
