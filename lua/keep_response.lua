-- keep_response(responses, kept, due, copied, queue; name, milliseconds, value, group, length, entries_max, bytes_max) -> {verdict, evicted, entries, bytes}
--
-- Keep the answer to a request of the Responses API, or delete one. With `group` the change is also queued for MongoDB.
-- If there is no room, the responses that end first are removed; with `group`, only those that MongoDB has.
--
-- KEYS  responses     hash, PX    `bytes`: the size of all responses; under the name of a response: its last change, if
--                                 MongoDB does not have it yet
--       kept          hash, PX    the responses; an empty value marks a deletion that MongoDB may not have yet
--       due           zset, PX    their names, by the Redis ms at which each ends
--       copied        zset, PX    the names of those that MongoDB has, likewise
--       queue         stream      names of responses to be copied, each once for every change; the field is `response`, or
--                                 `deletion`
-- ARGV  name          32 hex digits of the response
--       milliseconds  how long it is kept
--       value         the response; empty deletes it
--       group         the consumer group of the queue; empty without MongoDB
--       length        about how many names are queued at most; 0 if the response comes from MongoDB
--       entries_max   how many responses there may be
--       bytes_max     how many bytes they may take
--
-- {'applied', evicted, entries, bytes}  done; how many others were removed early, and how much is kept now
-- {'full', evicted, entries, bytes}     not done: it is too large, MongoDB lacks the others, or too many others would
--                                       have to be removed
-- {'stale', 0, entries, bytes}          the response comes from MongoDB, but Redis has one or its deletion; not written

local ENTRY_BYTES, REMOVED_MAX = 512, 256

local name, milliseconds, value, group, length = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entries = redis.call('ZCARD', KEYS[3])
-- If the last response was kept long ago, all keys have expired.
local bytes = entries > 0 and tonumber(redis.call('HGET', KEYS[1], 'bytes') or '0') or 0
-- A Redis that evicts may have removed `due` alone: nothing would remove these responses.
if entries == 0 then redis.call('DEL', KEYS[2]) end

local function remove(names)
  for _, each in ipairs(names) do
    bytes = bytes - redis.call('HSTRLEN', KEYS[2], each) - ENTRY_BYTES
    redis.call('HDEL', KEYS[2], each)
    redis.call('HDEL', KEYS[1], each)
    redis.call('ZREM', KEYS[4], each)
    entries = entries - redis.call('ZREM', KEYS[3], each)
  end
end

local function note_bytes()
  if entries > 0 then redis.call('HSET', KEYS[1], 'bytes', string.format('%.0f', bytes)) end
end

remove(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, REMOVED_MAX))
note_bytes()
local before = redis.call('HGET', KEYS[2], name)
if before and group ~= '' and length == 0 then return {'stale', 0, entries, bytes} end
if value == '' and group == '' then
  if before then remove({name}) end
  note_bytes()
  return {'applied', 0, entries, bytes}
end

-- If the new response is refused, the response of the same name stays as it was.
local free_entries, free_bytes, was_copied = 0, 0, false
if before then
  free_entries, free_bytes = 1, #before + ENTRY_BYTES
  was_copied = redis.call('ZREM', KEYS[4], name) == 1
end
local size, evicted = #value + ENTRY_BYTES, 0
local fits = size <= tonumber(ARGV[7])
local function has_room()
  return entries - free_entries < tonumber(ARGV[6]) and bytes - free_bytes + size <= tonumber(ARGV[7])
end
while fits and not has_room() and evicted < REMOVED_MAX do
  local oldest = redis.call('ZRANGE', group == '' and KEYS[3] or KEYS[4], 0, 0)
  if #oldest == 0 then break end
  if oldest[1] == name then free_entries, free_bytes = 0, 0 end
  remove(oldest)
  evicted = evicted + 1
end
if not (fits and has_room()) then
  if was_copied then redis.call('ZADD', KEYS[4], redis.call('ZSCORE', KEYS[3], name), name) end
  note_bytes()
  return {'full', evicted, entries, bytes}
end

local ends = string.format('%.0f', now + milliseconds)
redis.call('HSET', KEYS[2], name, value)
redis.call('ZADD', KEYS[3], ends, name)
entries, bytes = entries - free_entries + 1, bytes - free_bytes + size
if group ~= '' and length == 0 then
  redis.call('ZADD', KEYS[4], ends, name)
elseif group ~= '' then
  if redis.call('EXISTS', KEYS[5]) == 0 then redis.call('XGROUP', 'CREATE', KEYS[5], group, '0', 'MKSTREAM') end
  local change = redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', value == '' and 'deletion' or 'response', name)
  redis.call('HSET', KEYS[1], name, change)
end
note_bytes()
-- The keys last as long as any gateway keeps its responses.
local all_end = string.format('%.0f', now + math.max(redis.call('PTTL', KEYS[3]), milliseconds))
redis.call('PEXPIREAT', KEYS[1], all_end)
redis.call('PEXPIREAT', KEYS[2], all_end)
redis.call('PEXPIREAT', KEYS[3], all_end)
redis.call('PEXPIREAT', KEYS[4], all_end)
return {'applied', evicted, entries, bytes}
