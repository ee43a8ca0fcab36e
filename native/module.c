/* The loops that a query runs once for each token or block, in C.
 *
 *     cut          JSON text  ->  where the token ids stand, and the ids as little-endian u32     lists.c
 *     cut_hashes   JSON text  ->  where the hashes stand, and the hashes as little-endian u64     lists.c
 *     digest       bytes  ->  their XXH3-64                                                       hashing.c
 *     hash_blocks  token ids  ->  block keys, as big-endian u64                                   hashing.c
 *     chain        hashes of blocks by themselves  ->  block keys                                 hashing.c
 *     pack_keys    block keys  ->  one MGET command in RESP                                       commands.c
 *     scan         the reply to it  ->  runs of equal values, without an object for each value    replies.c
 *     runs         a list of values  ->  the same                                                 replies.c
 *
 * The module is optional: app/waymark/domain/native.py and hashing.py do the same in Python, and the same tests run
 * over both. app/waymark/domain/_native.pyi has the types. No function raises for what a client sent: `cut` returns None
 * for anything but a plain list of plain numbers, and the JSON parser decides what is wrong with it.
 */

#include "native.h"

#define ENTRY(name, doc) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, doc}

static PyMethodDef methods[] = {
    ENTRY(cut, "The token ids in a JSON text; None where the text is unusual."),
    ENTRY(cut_hashes, "The hashes in a JSON text; None where the text is unusual."),
    ENTRY(digest, "XXH3-64 of a payload."),
    ENTRY(hash_blocks, "The keys of a prompt's blocks."),
    ENTRY(chain, "The keys of blocks whose tokens are hashed already."),
    ENTRY(pack_keys, "Keys as the arguments of a command."),
    ENTRY(scan, "Equal neighbours in the reply to an MGET; None where the reply is unusual."),
    ENTRY(runs, "Equal neighbours in a list of values, up to the first None."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
