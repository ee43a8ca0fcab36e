/* Runs of events of several forms, such as those of the groups of a hybrid model, or of several media.
 *
 * app/waymark/domain/mixed_runs.py chooses for each form how its events are run, its way, and the holder of its blocks.
 * Windows and references name blocks that another holder of the rank has, or had. An event that does not fit its way is
 * left to its rule in Python, with nothing changed.
 */

#include "objects.h"
#include "runs.h"

/* In place of the number of a block: the block is new to its holder, or no holder of the rank has it. */
#define NEW_BLOCK UINT32_MAX
#define UNKNOWN_BLOCK (UINT32_MAX - 1)

/* What is done with the events of a form. app/waymark/domain/mixed_runs.py has the same numbers, and says what they
 * mean. */
typedef enum { LEFT_TO_RULE, PASSED_OVER, COUNTED, TOKENS, HASHES, KNOWN_HASHES, REMOVED, REMOVED_IF_HERE, WAYS } Way;

/* A holder: the table of its blocks, and the run of its events. */
typedef struct {
    KnownBlocks *known;
    Run run;
} HolderRun;

/* How the events of a form are run. */
typedef struct {
    long way;
    HolderRun *holder; /* NULL if the way needs none */
    uint64_t namespace;
    int64_t step, position_max; /* positions of each hash, and the last position of an event that is not left to its rule */
    Py_ssize_t events, unknown; /* how many events were run, and how many of their blocks are unknown */
} FormRun;

/* The forms of a batch, and their holders. */
typedef struct {
    HolderRun holders[FORMS_MAX];
    FormRun forms[FORMS_MAX];
    size_t holders_count;
} MixedRun;

/* ---- stores by hash ------------------------------------------------------------------------------- */

/* Return the block of a hash that the holder does not have: from the first neighbour that has it, or else from the gone
 * blocks. NULL if there is none. */
static const Block *find_beside(const Run *run, uint64_t hash)
{
    const size_t gone = (size_t)PyTuple_Size(run->gone);
    for (size_t i = 0; i < run->neighbours_count + gone; i++) {
        KnownBlocks *table = i < run->neighbours_count
                                 ? run->neighbours[i].known
                                 : (KnownBlocks *)PyTuple_GetItem(run->gone, (Py_ssize_t)(i - run->neighbours_count));
        const int64_t number = find_hash(table, hash);
        if (number >= 0)
            return block_at(table, (uint32_t)number);
    }
    return NULL;
}

/* Read the block of a hash into *block, and its number in the table of the holder into *number. 0 if the block has
 * several hashes, or would get a second one. */
static int look_up(const HolderRun *holder, uint64_t hash, Block *block, uint32_t *number)
{
    const int64_t here = find_hash(holder->known, hash);
    if (here >= 0) {
        *block = *block_at(holder->known, (uint32_t)here);
        *number = (uint32_t)here;
        return block->is_first && block->copies > 0 && block->copies < COPIES_MAX;
    }
    const Block *found = find_beside(&holder->run, hash);
    *number = found == NULL ? UNKNOWN_BLOCK : NEW_BLOCK;
    if (found == NULL)
        return 1;
    *block = (Block){hash, found->key, found->place, .depth = found->depth};
    return find_key(holder->known, block->key) < 0;
}

/* Look up the blocks of a store, into the memory of the run. 1 if they can be stored, 0 if not, -1 with an
 * exception. */
static int look_up_all(HolderRun *holder, const FormRun *form, const uint64_t *hashes, size_t count)
{
    Run *run = &holder->run;
    size_t fresh = 0;
    fetch_blocks(holder->known, &holder->known->by_hash, hashes, count);
    for (size_t i = 0; i < run->neighbours_count; i++)
        fetch_blocks(run->neighbours[i].known, &run->neighbours[i].known->by_hash, hashes, count);
    for (size_t i = 0; i < count; i++) {
        if (hashes[i] == UINT64_MAX || !look_up(holder, hashes[i], &run->blocks[i], &run->numbers[i]))
            return 0; /* SAME_HASH, which an entry cannot contain, or a block with several hashes */
        if (run->numbers[i] == UNKNOWN_BLOCK && form->way == KNOWN_HASHES)
            return 0;
        if (run->numbers[i] == NEW_BLOCK)
            run->keys[fresh++] = run->blocks[i].key;
    }
    const int has_same = has_repeats(run->keys, fresh);
    return has_same < 0 ? -1 : !has_same;
}

/* Begin the part of a block, which continues the block `before`, unless that is NULL. 0 with an exception. */
static int begin_part(const HolderRun *holder, const Block *block, const Block *before, Part *part)
{
    const Run *run = &holder->run;
    *part = part_at(holder->known, block->place, run->holder);
    part->kind = '+';
    part->has_parent = before != NULL && before->depth + 1 == block->depth &&
                       holder->known->places->places[before->place].head == part->head;
    part->parent = part->has_parent ? before->key : 0;
    if (run->waves == NULL)
        return 1;
    uint64_t hash = block->hash, key = block->key;
    const Store alone = {.hashes = &hash, .keys = &key, .count = 1, .namespace = part->namespace};
    return note_stored(run, &alone, 0, 1, NULL, part) &&
           use_block(run->waves, key ^ part->namespace, shard_of(run->waves, part->head));
}

/* Run a store whose blocks are named by their hashes alone; the result is that of run_store. */
static int store_by_hash(HolderRun *holder, FormRun *form, const PlainEvent *event, int64_t position)
{
    KnownBlocks *known = holder->known;
    Run *run = &holder->run;
    const size_t count = event->hashes_count;
    const int are_usual = look_up_all(holder, form, run->events->hashes + event->hashes, count);
    if (are_usual != 1)
        return are_usual;
    const Block *before = NULL;
    size_t fresh = 0;
    for (size_t i = 0; i < count; i++, position++) {
        const Block *block = &run->blocks[i];
        const uint32_t number = run->numbers[i];
        Part part;
        if (number == UNKNOWN_BLOCK) {
            form->unknown++;
            before = NULL;
            continue;
        }
        if (!begin_part(holder, block, before, &part))
            return -1;
        part.is_known = number != NEW_BLOCK;
        if (part.is_known ? !add_again(known, run, event, block_at(known, number), &part, position)
                          : !put_new_block(known, block->hash, block->key, block->place, (uint8_t)block->depth) ||
                                !add_blocks(run, &part, position, block, 1, NULL))
            return -1;
        if (!part.is_known)
            run->keys[fresh++] = block->hash;
        before = block;
    }
    discard_beside(run->gone, run->keys, fresh);
    run->stored += (Py_ssize_t)fresh;
    return 1;
}

/* ---- one event after the other --------------------------------------------------------------------- */

/* Return whether a table has none of the blocks of an event. */
static int has_none(KnownBlocks *known, const uint64_t *hashes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (find_hash(known, hashes[i]) >= 0)
            return 0;
    return 1;
}

/* Run an event of a form. 1, or 0 if it is left to its rule and nothing has changed, or -1 with an exception. */
static int run_form(FormRun *form, const Events *events, const PlainEvent *event, int64_t position)
{
    HolderRun *holder = form->holder;
    if (form->way == COUNTED)
        return 1;
    if (!are_positions(position, event->hashes_count, 1, HASH_POSITION_MAX))
        return 0;
    if (!make_event_room(&holder->run, event->hashes_count))
        return -1;
    holder->run.namespace = form->namespace;
    switch ((Way)form->way) {
    case TOKENS: return run_store(holder->known, &holder->run, event, position);
    case HASHES:
    case KNOWN_HASHES: return store_by_hash(holder, form, event, position);
    case REMOVED_IF_HERE:
        if (has_none(holder->known, events->hashes + event->hashes, event->hashes_count))
            return 1;
        __attribute__((fallthrough));
    default: return run_removal(holder->known, &holder->run, event, position);
    }
}

/* Run the events from *at on, up to the first that is left to its rule, or until they have `hashes_max` hashes. 0 with
 * an exception. */
static int run_forms(MixedRun *mixed, const Events *events, size_t *at, int64_t *position, size_t hashes_max,
                     size_t *hashes)
{
    for (; *at < events->count && *hashes < hashes_max; ++*at) {
        const PlainEvent *event = &events->events[*at];
        FormRun *form = &mixed->forms[event->form];
        if (form->way == PASSED_OVER)
            continue;
        if (form->way == LEFT_TO_RULE || *position > form->position_max)
            return 1;
        const int has_gone = run_form(form, events, event, *position);
        if (has_gone != 1)
            return has_gone == 0;
        form->events++;
        *position += form->step * event->hashes_count;
        *hashes += event->hashes_count;
    }
    return 1;
}

/* ---- from Python ----------------------------------------------------------------------------------- */

/* Read the holders, each (known, holder, gone, neighbours, may). 0 with an exception. */
static int read_holders(PyObject *given, const Run *common, MixedRun *mixed)
{
    if (PyTuple_Size(given) > FORMS_MAX) {
        PyErr_Format(PyExc_ValueError, "there are at most %d holders", FORMS_MAX);
        return 0;
    }
    mixed->holders_count = (size_t)PyTuple_Size(given);
    for (size_t i = 0; i < mixed->holders_count; i++) {
        HolderRun *holder = &mixed->holders[i];
        PyObject *known, *neighbours;
        unsigned long long id;
        holder->run = *common;
        PyObject *told = PyTuple_GetItem(given, (Py_ssize_t)i);
        if (!PyTuple_Check(told)) {
            PyErr_Format(PyExc_TypeError, "a holder is a tuple, not %R", told);
            return 0;
        }
        if (!PyArg_ParseTuple(told, "OKOOi", &known, &id, &holder->run.gone, &neighbours, &holder->run.may))
            return 0;
        holder->known = as_known(known);
        if (holder->known == NULL || !are_beside(holder->known, holder->run.gone) ||
            !read_neighbours(holder->known, &holder->run, neighbours))
            return 0;
        if (PyTuple_Size(holder->run.gone) == 0 || !holder->known->has_keys) {
            PyErr_Format(PyExc_ValueError, "a holder has a table with keys, and a place for what is gone");
            return 0;
        }
        holder->run.holder = id;
        holder->run.may |= MAY_REPEAT;
    }
    return 1;
}

/* Read the forms, each (way, holder, namespace, step, position_max). 0 with an exception. */
static int read_forms(PyObject *given, const Events *events, MixedRun *mixed)
{
    if ((size_t)PyTuple_Size(given) != events->forms) {
        PyErr_Format(PyExc_ValueError, "there are %zu forms, not %zd", events->forms, PyTuple_Size(given));
        return 0;
    }
    for (size_t i = 0; i < events->forms; i++) {
        FormRun *form = &mixed->forms[i];
        Py_ssize_t holder;
        unsigned long long namespace;
        long long step, position_max;
        PyObject *told = PyTuple_GetItem(given, (Py_ssize_t)i);
        if (!PyTuple_Check(told)) {
            PyErr_Format(PyExc_TypeError, "a form is a tuple, not %R", told);
            return 0;
        }
        if (!PyArg_ParseTuple(told, "lnKLL", &form->way, &holder, &namespace, &step, &position_max))
            return 0;
        if (form->way < 0 || form->way >= WAYS || holder < 0 || step < 0 || step > UINT16_MAX ||
            (form->way > COUNTED && (size_t)holder >= mixed->holders_count)) {
            PyErr_Format(PyExc_ValueError, "a form has a way, a holder, and a number of positions");
            return 0;
        }
        form->holder = form->way > COUNTED ? &mixed->holders[holder] : NULL;
        form->namespace = namespace;
        form->step = step;
        form->position_max = position_max;
    }
    return 1;
}

/* Return the counts of the holders and of the forms after a run: a tuple, or NULL with an exception. */
static PyObject *tell_counts(const MixedRun *mixed, const Events *events, size_t at, int64_t position, size_t hashes)
{
    PyObject *holders = PyList_New(0), *forms = PyList_New(0);
    int is_done = holders != NULL && forms != NULL;
    for (size_t i = 0; is_done && i < mixed->holders_count; i++) {
        const Run *run = &mixed->holders[i].run;
        PyObject *counts = Py_BuildValue("nnnnO", run->stored, run->removed, run->restored, run->miscounted,
                                         run->may & REMOVED_EACH ? Py_True : Py_False);
        is_done = counts != NULL && PyList_Append(holders, counts) == 0;
        Py_XDECREF(counts);
    }
    for (size_t i = 0; is_done && i < events->forms; i++) {
        PyObject *counts = Py_BuildValue("nn", mixed->forms[i].events, mixed->forms[i].unknown);
        is_done = counts != NULL && PyList_Append(forms, counts) == 0;
        Py_XDECREF(counts);
    }
    if (is_done)
        return Py_BuildValue("nLnNN", (Py_ssize_t)at, (long long)position, (Py_ssize_t)hashes, holders, forms);
    Py_XDECREF(holders);
    Py_XDECREF(forms);
    return NULL;
}

/* run(at: int, position: int, hashes_max: int, parts: Parts, holders: tuple, forms: tuple, seed: int, full: dict[Place, object],
 *     piece_blocks: int, waves: Waves)
 *     -> tuple[int, int, int, list[tuple[int, int, int, int, bool]], list[tuple[int, int]]]
 *
 * Run the events from number `at` on: store and remove their blocks, and add the parts to `parts`. Ends before the
 * first event that is left to its rule, and after `hashes_max` hashes or somewhat more. A holder is (known, id, gone,
 * neighbours, may), as for KnownBlocks.run; a form is (way, number of its holder, namespace, step, position_max).
 * Returns the number of the next event, its position, how many hashes there were; for each holder how many blocks were
 * stored and removed, how many were stored again after a removal had left a copy, how many have copies that the engine
 * counts differently, and whether a copy that was left has been removed; and for each form how many events were run, and
 * how many of their blocks are unknown.
 */
PyObject *events_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Events *events = (Events *)self;
    Run common = {.events = events};
    MixedRun mixed = {0};
    if (!has_arguments("run", nargs, 10))
        return NULL;
    size_t at = PyLong_AsSize_t(args[0]), hashes = 0;
    int64_t position = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[1]);
    const size_t hashes_max = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[2]);
    const uint64_t seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[6]);
    const long piece_blocks = PyErr_Occurred() ? 0 : PyLong_AsLong(args[8]);
    common.parts = PyErr_Occurred() ? NULL : as_parts(args[3]);
    Waves *waves = common.parts == NULL ? NULL : as_waves(args[9]);
    if (waves == NULL)
        return NULL;
    if (at > events->count)
        return PyErr_Format(PyExc_ValueError, "at is %zu, and there are %zu events", at, events->count);
    if (!PyTuple_Check(args[4]) || !PyTuple_Check(args[5]) || !PyDict_Check(args[7]) || piece_blocks < 1 ||
        piece_blocks > PIECE_BLOCKS)
        return PyErr_Format(PyExc_ValueError, "run() takes two tuples, a dict, and pieces of up to 32 blocks");
    common.waves = waves->shards > 1 ? waves : NULL;
    common.full = args[7];
    common.piece_blocks = (int)piece_blocks;
    const size_t width = sizeof(uint32_t) * events->block_size;
    xxh3_prepare(&common.state, seed, width > 2 * KEY ? width : 2 * KEY);
    const int is_done = read_holders(args[4], &common, &mixed) && read_forms(args[5], events, &mixed) &&
                        run_forms(&mixed, events, &at, &position, hashes_max, &hashes);
    for (size_t i = 0; i < mixed.holders_count; i++) {
        PyMem_Free(mixed.holders[i].run.neighbours);
        free_event_room(&mixed.holders[i].run);
    }
    return is_done ? tell_counts(&mixed, events, at, position, hashes) : NULL;
}
