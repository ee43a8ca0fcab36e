-- keep_response(responses, kept, due, copied, queue; name, milliseconds, value, group, length, entries_max, bytes_max) -> {verdict, evicted, entries, bytes}
--
-- Keep the answer to a request of the Responses API, or delete one. With a group, what was done is queued for MongoDB.
-- Where there is no room, the responses that end first make it; with a group, only those that MongoDB has.
--
-- KEYS  responses     hash, PX    `bytes`: those of all responses; under a name: its last change that MongoDB has not
--       kept          hash, PX    the responses; empty: it is deleted, and MongoDB may not know it yet
--       due           zset, PX    their names, by the Redis ms at which each ends
--       copied        zset, PX    of these the names that MongoDB has
--       queue         stream      names of responses to be copied, each once for every change
-- ARGV  name          32 hex digits of the response
--       milliseconds  how long it is kept
--       value         the response; empty: it is deleted
--       group         the consumer group of the queue; empty: there is no MongoDB
--       length        how many names are queued at most, about; 0: MongoDB has the response already
--       entries_max   how many responses there may be
--       bytes_max     how many bytes they may take
--
-- {'applied', evicted, entries, bytes}  done; so many others went before their time, and so much there is now
-- {'full', evicted, entries, bytes}     not done: too large, MongoDB lacks the others, or too many would have to go
-- {'stale', 0, entries, bytes}          MongoDB has one, and Redis has it too, a newer one, or its deletion

local ENTRY_BYTES, REMOVED_MAX = 512, 256

local name, milliseconds, value, group, length = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entries = redis.call('ZCARD', KEYS[3])
-- All keys have ended together where the last response was kept long ago.
local bytes = entries > 0 and tonumber(redis.call('HGET', KEYS[1], 'bytes') or '0') or 0

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

-- One that is refused leaves what was there before it.
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
  local change = redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', 'response', name)
  redis.call('HSET', KEYS[1], name, change)
end
note_bytes()
-- Another gateway may keep its responses for longer.
local all_end = string.format('%.0f', now + math.max(redis.call('PTTL', KEYS[3]), milliseconds))
redis.call('PEXPIREAT', KEYS[1], all_end)
redis.call('PEXPIREAT', KEYS[2], all_end)
redis.call('PEXPIREAT', KEYS[3], all_end)
redis.call('PEXPIREAT', KEYS[4], all_end)
return {'applied', evicted, entries, bytes}
