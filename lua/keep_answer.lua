-- keep_answer(answers, kept, due; nonce, name, milliseconds, entries_max, bytes_max, value) -> {verdict, evicted, entries, bytes}
--
-- Keep the answer to a request for all gateways. If there is no room, the answers that end first are removed.
--
-- KEYS  answers       hash      `nonce`: that of the last clearing; `bytes`: those of all answers
--       kept          hash, PX  the answers
--       due           zset, PX  their names, by the Redis ms at which each ends
-- ARGV  nonce         the nonce at the time when the request began
--       name          64 hex digits that identify the request
--       milliseconds  how long the answer is kept
--       entries_max   how many answers there may be
--       bytes_max     how many bytes they may take
--       value         the answer
--
-- {'applied', evicted, entries, bytes}  kept; how many others were removed early, and how much is kept now
-- {'full', evicted, entries, bytes}     not kept: it exceeds `bytes_max`, or too many others would have to be removed
-- {'stale', 0, 0, 0}                    all answers were cleared since the request began; nothing written

local ENTRY_BYTES, REMOVED_MAX = 512, 256

local nonce, name, milliseconds, value = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[6]
if (redis.call('HGET', KEYS[1], 'nonce') or '') ~= nonce then return {'stale', 0, 0, 0} end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entries = redis.call('ZCARD', KEYS[3])
-- If the last answer was kept long ago, `kept` and `due` have expired, and `bytes` is too high.
local bytes = entries > 0 and tonumber(redis.call('HGET', KEYS[1], 'bytes') or '0') or 0
-- A Redis that evicts may have removed `due` alone: nothing would remove these answers.
if entries == 0 then redis.call('DEL', KEYS[2]) end

local function remove(names)
  for _, each in ipairs(names) do
    bytes = bytes - redis.call('HSTRLEN', KEYS[2], each) - ENTRY_BYTES
    redis.call('HDEL', KEYS[2], each)
    entries = entries - redis.call('ZREM', KEYS[3], each)
  end
end

remove(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, REMOVED_MAX))
if redis.call('ZSCORE', KEYS[3], name) then remove({name}) end
local size, evicted = #value + ENTRY_BYTES, 0
local fits = size <= tonumber(ARGV[5])
local function has_room() return entries < tonumber(ARGV[4]) and bytes + size <= tonumber(ARGV[5]) end
while fits and not has_room() and entries > 0 and evicted < REMOVED_MAX do
  remove(redis.call('ZRANGE', KEYS[3], 0, 0))
  evicted = evicted + 1
end
if not (fits and has_room()) then
  redis.call('HSET', KEYS[1], 'bytes', string.format('%.0f', bytes))
  return {'full', evicted, entries, bytes}
end
redis.call('HSET', KEYS[2], name, value)
redis.call('ZADD', KEYS[3], string.format('%.0f', now + milliseconds), name)
redis.call('HSET', KEYS[1], 'bytes', string.format('%.0f', bytes + size))
-- The keys last as long as any gateway keeps its answers.
if redis.call('PTTL', KEYS[2]) < milliseconds then
  local ends = string.format('%.0f', now + milliseconds)
  redis.call('PEXPIREAT', KEYS[2], ends)
  redis.call('PEXPIREAT', KEYS[3], ends)
end
return {'applied', evicted, entries + 1, bytes + size}
