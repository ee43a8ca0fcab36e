-- apply_prefixes(record, fence, prefixes, hot, warm, prefix*; publisher, token, calls, milliseconds, hot_holder, warm_holder, change*) -> {verdict, hot_entries, warm_entries, calls}
--
-- Apply what a source of opaque prefixes has reported, in order. An entry is a prefix at one of the source's two
-- holders, hot (on the device) or warm (in storage), with a count of tokens and the time at which it ends. The same call
-- may arrive twice, and late: if its changes are applied again, the entries stay the same, and after a later call it
-- writes nothing.
--
-- KEYS  record    hash  the publisher's record; `late`: a call that was sent with fewer `calls` arrives late
--       fence     hash  the fence of shard 0; `calls:<publisher>`: how many calls of its stream were made here
--       prefixes  zset  the group's prefixes, by the Redis ms at which each ends
--       hot       zset  prefixes of the hot holder, by the Redis ms at which each ends
--       warm      zset  prefixes of the warm holder, likewise
--       prefix*   hash  one for each change: a holder's tokens and the end of the entry; `until`: the latest end
-- ARGV  publisher     its integer id
--       token         the lease token the caller believes is the highest
--       calls         the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       milliseconds  how long an entry lasts
--       hot_holder    holder id
--       warm_holder   holder id
--       change*       the kind of change, and the tokens. The kinds: 'hot' or 'warm': only that holder has the prefix;
--                     'demote': if the hot holder has it, only the warm one has it from now on; 'remove': no holder has
--                     it; 'forget_hot' or 'forget_warm': that holder does not have it. If tokens is '', the count is
--                     that of the source's entry, or 1 if there was none
--
-- {'applied', hot_entries, warm_entries, calls}  how many entries each holder has now; `calls` counts this call
-- {'fenced', 0, 0, 0}  another worker has the stream, the publisher is gone, writes are lost, or this call is late;
--                      nothing written

local TRIMMED_MAX = 256

local state = redis.call('HMGET', KEYS[1], 'token', 'late')
if state[1] ~= ARGV[2] then return {'fenced', 0, 0, 0} end
local count = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[2], count) or 0) or 0
local sent, late = tonumber(ARGV[3]), tonumber(state[2] or 0) or 0
if calls < sent or sent < late then return {'fenced', 0, 0, 0} end
redis.call('HSET', KEYS[2], count, string.format('%.0f', calls + 1))
redis.call('HSET', KEYS[1], 'late', ARGV[3])

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local till = now + ARGV[4]
local ends = string.format('%.0f', till)
local hot, warm = {zset = KEYS[4], id = ARGV[5]}, {zset = KEYS[5], id = ARGV[6]}

-- Other sources share this key of the group, and their entries may last longer.
local function keep(key)
  if redis.call('PTTL', key) < tonumber(ARGV[4]) then redis.call('PEXPIREAT', key, ends) end
end

local function tokens_of(prefix, holder)
  local tokens, over = (redis.call('HGET', prefix, holder.id) or ''):match('^(%d+) (%d+)$')
  return over and tonumber(over) > now and tokens or nil
end

-- Removes fields of ended holders from a prefix that other holders keep, once in a while.
local function trim(prefix)
  if redis.call('HLEN', prefix) % 64 ~= 0 then return end
  local fields = redis.call('HGETALL', prefix)
  for i = 1, #fields, 2 do
    local over = fields[i + 1]:match('^%d+ (%d+)$')
    if over and tonumber(over) <= now then redis.call('HDEL', prefix, fields[i]) end
  end
end

local function set(prefix, name, holder, tokens)
  if redis.call('HSET', prefix, holder.id, tokens .. ' ' .. ends) == 1 then trim(prefix) end
  local latest = tonumber(redis.call('HGET', prefix, 'until') or 0)
  if till > latest then
    redis.call('HSET', prefix, 'until', ends)
    redis.call('PEXPIREAT', prefix, ends)
    redis.call('ZADD', KEYS[3], ends, name)
  end
  redis.call('ZADD', holder.zset, ends, name)
  redis.call('PEXPIREAT', holder.zset, ends)
  keep(KEYS[3])
end

local function drop(prefix, name, holder)
  redis.call('ZREM', holder.zset, name)
  if redis.call('HDEL', prefix, holder.id) == 1 and redis.call('HLEN', prefix) == 1 then -- only `until` remains
    redis.call('DEL', prefix)
    redis.call('ZREM', KEYS[3], name)
  end
end

for i = 6, #KEYS do
  local prefix, name = KEYS[i], KEYS[i]:sub(-32)
  local what, tokens = ARGV[2 * i - 5], ARGV[2 * i - 4]
  if what == 'hot' or what == 'warm' then
    local to, from = hot, warm
    if what == 'warm' then to, from = warm, hot end
    if tokens == '' then tokens = tokens_of(prefix, from) or tokens_of(prefix, to) or '1' end
    set(prefix, name, to, tokens)
    drop(prefix, name, from)
  elseif what == 'demote' then
    local had = tokens_of(prefix, hot)
    if had then set(prefix, name, warm, had) end
    drop(prefix, name, hot)
  else
    if what ~= 'forget_warm' then drop(prefix, name, hot) end
    if what ~= 'forget_hot' then drop(prefix, name, warm) end
  end
end

for i = 3, 5 do
  local over = redis.call('ZRANGEBYSCORE', KEYS[i], '-inf', now, 'LIMIT', 0, TRIMMED_MAX)
  if #over > 0 then redis.call('ZREMRANGEBYRANK', KEYS[i], 0, #over - 1) end
end
return {'applied', redis.call('ZCARD', KEYS[4]), redis.call('ZCARD', KEYS[5]), calls + 1}
