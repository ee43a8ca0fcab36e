/* The loops that a query, or an event, runs once for each byte, token or block, in C.
 *
 *     cut          JSON text  ->  where the token ids are, and the ids as little-endian u32       lists.c
 *     cut_hashes   JSON text  ->  where the hashes are, and the hashes as little-endian u64       lists.c
 *     plain_post   bytes of a connection  ->  the parts of a plain request                        heads.c
 *     digest       bytes  ->  their XXH3-64                                                       hashing.c
 *     hash_blocks  token ids  ->  block keys, as big-endian u64                                   hashing.c
 *     hash_keys    hashes of prompts, as little-endian u64  ->  block keys                        hashing.c
 *     chain        hashes of blocks by themselves  ->  block keys                                 hashing.c
 *     read_batch   msgpack of a batch  ->  its plain events                                       batches.c
 *                  the fields of an event                                                         fields.c
 *     row_runs     block keys and rows  ->  runs of equal holders                                 row_runs.c
 *     piece_runs   the same for one piece, from all its values                                    row_runs.c
 *                  the value of a row                                                             rows.c
 *     rank_sums    targets, their rows and loads  ->  the same, least cost first                      sums.c
 *     offer_sums   the first of these  ->  offers, promises and words of a reservation                offers.c
 *     pack_sums    the same  ->  a packed call of reserve                                             offers.c
 *     add_columns  weighted columns of numbers  ->  the sum of each candidate                     columns.c
 *     least_of     such sums  ->  the places of the least                                         columns.c
 *     Places       the places of a stream                                                         places.c
 *     KnownBlocks  engine hashes, and the block of each, at a place                               known.c
 *                  its table, and an index by hash                                                blocks.c, index.c
 *                  its methods for whole events                                                   stores.c, removals.c
 *                  its method for whole batches                                                   runs.c
 *     Parts        what changes in the index                                                      parts.c
 *                  from Python, for each shard, and as the script of Redis reads it               adding.c, shares.c, calls.c
 *                  from the payloads of batches like some before to the words of calls            frames.c
 *     Waves        the blocks of parts that other shards may have to wait for                      waves.c
 *     Events       plain events of one batch                                                      events.c
 *                  as objects                                                                     event_objects.c
 *                  its method for events of several forms                                         mixed.c
 *
 * The module is optional: app/waymark/base/native.py has the types and says where the same is done in Python; the same
 * tests run over both. No function raises because of a client's input: `cut` returns None for anything but a plain list
 * of plain numbers, and the JSON parser decides what is wrong with it.
 */

#include "native.h"

/* The digest of the files that the module is built from: app/waymark/base/native.py refuses a module that was built
 * from other files. */
#ifndef WAYMARK_SOURCES
#error "define WAYMARK_SOURCES, as hatch_build.py does"
#endif

/* The arguments are in the docstring, because Python looks for a signature there. */
#define ENTRY(name, arguments, doc)                                                                                    \
    {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, #name "($module, " arguments ", /)\n--\n\n" doc}

static PyMethodDef methods[] = {
    ENTRY(cut, "body, name, count_max", "Return the token ids in a JSON text; None if the text is unusual."),
    ENTRY(cut_hashes, "body, name, count_max", "Return the hashes in a JSON text; None if the text is unusual."),
    ENTRY(plain_post, "data", "Return the path, fields and body of a plain POST; None for any other data."),
    ENTRY(digest, "payload, seed", "Return the XXH3-64 of a payload."),
    ENTRY(hash_blocks, "tokens, block_size, seed, parent, namespace", "Return the keys of a prompt's blocks."),
    ENTRY(hash_keys, "seq_hashes, namespace", "Return the keys of blocks whose seq_hashes are known."),
    ENTRY(chain, "local_hashes, seed, parent", "Return the keys of blocks whose tokens are hashed already."),
    ENTRY(read_batch,
          "payload, events_max, stored, reference, window, removed, cleared, medium, stored_fields, removed_fields",
          "Return the plain events of a batch; None if the batch is unusual."),
    ENTRY(row_runs, "keys, rows", "Return runs of equal holders, as far as the row of each piece decides by itself."),
    ENTRY(piece_runs, "keys, values", "Return runs of equal holders in one piece, by its row and branch rows."),
    ENTRY(rank_sums,
          "members, rows, loads, expected, draw, tokens, least, size, device_credit, host_credit, disk_credit, "
          "shared_credit, weight_new, weight_active",
          "Return the targets of a decision, least cost first, if their costs are sums."),
    ENTRY(offer_sums, "offer, sums, most, blocks, size, weight_new, available, reusable, random, handicap, weight",
          "Return the offers, promises and words of a reservation."),
    ENTRY(pack_sums, "head, words, sums, most, blocks, size, weight_new, available, reusable, random, handicap, weight",
          "Pack a call of reserve."),
    ENTRY(add_columns, "columns, is_clamped", "Add up columns with weights, for each candidate."),
    ENTRY(least_of, "values, draws, most, sign", "Return the places of the least values, least first."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

/* Called when the module is imported, and each time it is loaded again. */
PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *created = PyModule_Create(&module);
    if (created != NULL && (add_places(created) < 0 || add_known(created) < 0 || add_parts(created) < 0 ||
                            add_waves(created) < 0 || add_events(created) < 0 ||
                            PyModule_AddStringConstant(created, "sources", WAYMARK_SOURCES) < 0))
        Py_CLEAR(created);
    return created;
}
