/* Reads the values of msgpack that events can have: https://github.com/msgpack/msgpack/blob/master/spec.md */

#ifndef WAYMARK_MSGPACK_H
#define WAYMARK_MSGPACK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The rest of the payload. */
typedef struct {
    const unsigned char *at, *end;
} Reader;

typedef enum { NIL, BOOLEAN, INTEGER, NEGATIVE, FLOATING, TEXT, BINARY, LIST, MAP } Kind;

typedef struct {
    Kind kind;
    uint64_t number;            /* the 64 bits of an integer, or of a float as a double; else the length */
    const unsigned char *start; /* of texts and binaries */
} Value;

/* How deeply values may be nested; deeper ones are left to the library. */
enum { DEPTH_MAX = 16 };

/* Return the number in `bytes` bytes, up to 8, the highest first. */
static inline uint64_t big_endian(const unsigned char *at, int bytes)
{
    uint64_t number = 0;
    for (int i = 0; i < bytes; i++)
        number = number << 8 | at[i];
    return number;
}

/* Read a number of `bytes` bytes. 0 if it is not whole. */
static inline int read_width(Reader *reader, int bytes, uint64_t *number)
{
    if (reader->end - reader->at < bytes)
        return 0;
    *number = big_endian(reader->at, bytes);
    reader->at += bytes;
    return 1;
}

/* Read a text or a binary of `value->number` bytes. */
static inline int read_span(Reader *reader, Kind kind, Value *value)
{
    if ((uint64_t)(reader->end - reader->at) < value->number)
        return 0;
    value->kind = kind;
    value->start = reader->at;
    reader->at += value->number;
    return 1;
}

/* Read the head of a list or a map. Each of its values takes at least a byte, so a length above the bytes that are left
 * is refused. */
static inline int read_length(Reader *reader, Kind kind, Value *value)
{
    value->kind = kind;
    return value->number <= (uint64_t)(reader->end - reader->at) / (kind == MAP ? 2 : 1);
}

/* Read an integer in two's complement. 0 if it is not whole. */
static inline int read_signed(Reader *reader, int bytes, Value *value)
{
    if (!read_width(reader, bytes, &value->number))
        return 0;
    const int is_negative = (int)(value->number >> (8 * bytes - 1));
    if (is_negative && bytes < 8)
        value->number |= UINT64_MAX << 8 * bytes;
    value->kind = is_negative ? NEGATIVE : INTEGER;
    return 1;
}

/* Read a float of 4 or 8 bytes, as a double. 0 if it is not whole. */
static inline int read_float(Reader *reader, int bytes, Value *value)
{
    if (!read_width(reader, bytes, &value->number))
        return 0;
    if (bytes == 4) {
        const uint32_t bits = (uint32_t)value->number;
        float narrow;
        memcpy(&narrow, &bits, sizeof narrow);
        const double wide = narrow;
        memcpy(&value->number, &wide, sizeof wide);
    }
    value->kind = FLOATING;
    return 1;
}

/* Read the next value. 0 if it is not whole, or of a type that no event has (extensions). */
static inline int read_value(Reader *reader, Value *value)
{
    if (reader->at >= reader->end)
        return 0;
    const unsigned char head = *reader->at++;
    if (head < 0x80 || head >= 0xe0) {
        value->kind = head < 0x80 ? INTEGER : NEGATIVE;
        value->number = head < 0x80 ? head : UINT64_MAX << 8 | head;
        return 1;
    }
    if (head < 0xc0) {
        value->number = head & (head < 0xa0 ? 0x0f : 0x1f);
        if (head >= 0xa0)
            return read_span(reader, TEXT, value);
        return read_length(reader, head < 0x90 ? MAP : LIST, value);
    }
    switch (head) {
    case 0xc0:
        value->kind = NIL;
        return 1;
    case 0xc2:
    case 0xc3:
        value->kind = BOOLEAN;
        return 1;
    case 0xc4:
    case 0xc5:
    case 0xc6:
        return read_width(reader, 1 << (head - 0xc4), &value->number) && read_span(reader, BINARY, value);
    case 0xca:
    case 0xcb:
        return read_float(reader, 4 << (head - 0xca), value);
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
        value->kind = INTEGER;
        return read_width(reader, 1 << (head - 0xcc), &value->number);
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
        return read_signed(reader, 1 << (head - 0xd0), value);
    case 0xd9:
    case 0xda:
    case 0xdb:
        return read_width(reader, 1 << (head - 0xd9), &value->number) && read_span(reader, TEXT, value);
    case 0xdc:
    case 0xdd:
        return read_width(reader, 2 << (head - 0xdc), &value->number) && read_length(reader, LIST, value);
    case 0xde:
    case 0xdf:
        return read_width(reader, 2 << (head - 0xde), &value->number) && read_length(reader, MAP, value);
    default:
        return 0;
    }
}

/* Skip the next value, with everything in it. 0 if it is not whole and plain. */
static inline int skip_value(Reader *reader, int depth)
{
    Value value;
    if (!read_value(reader, &value))
        return 0;
    if (value.kind < LIST)
        return 1;
    if (depth == DEPTH_MAX)
        return 0;
    for (uint64_t left = value.kind == MAP ? 2 * value.number : value.number; left > 0; left--)
        if (!skip_value(reader, depth + 1))
            return 0;
    return 1;
}

#endif
