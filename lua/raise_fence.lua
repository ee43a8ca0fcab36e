-- raise_fence(fence; publisher, token, first) -> {verdict, counter, holder, calls, first}
--
-- Reject every older token of a publisher on one shard, before the new lease holder reads anything there.
--
-- KEYS  fence      hash  the fence of the shard; `calls:<publisher>`: how many calls of its stream were made here;
--                          `first:<publisher>`: see apply_rows
-- ARGV  publisher  its integer id
--       token      `<counter>.<random>`. It is accepted if its counter is larger than the counter of the fence's token,
--                  or if it is the same token again
--       first      if the shard was told that shard 0 has acknowledged more calls than this, it forgets that; '' keeps
--                  what it was told
--
-- If the highest holder id in the fence cannot be read, it may have been any id. An id above all of them replaces it.
--
-- {'applied', counter, holder, calls, first}  the fence has this token; `holder` is the highest holder id seen here
-- {'fenced', counter, holder, calls, first}   the fence has another token, with this counter; nothing written

-- A count as a script has written it; nil for any other text.
local function integer(text) return text and #text < 17 and text:match('^%d+$') and tonumber(text) or nil end

-- An id that no Redis with this clock has reached: one id per microsecond (see new_life).
local function first_id()
  local now = redis.call('TIME')
  return math.max(0, (tonumber(now[1]) - 1767225600) * 1000000 + tonumber(now[2]))
end

-- A token that cannot be read counts as 0: no worker can have such a token, so it need not be rejected.
local function counter_of(token)
  local digits = token:match('^(%d+)%.')
  return digits and #digits < 16 and tonumber(digits) or 0
end

local seen = redis.call('HMGET', KEYS[1], ARGV[1], 'holder', 'calls:' .. ARGV[1], 'first:' .. ARGV[1])
local calls, first = tonumber(seen[3] or 0) or 0, tonumber(seen[4] or 0) or 0
local holder = integer(seen[2] or '0')
if not holder then
  holder = first_id()
  redis.call('HSET', KEYS[1], 'holder', string.format('%.0f', holder))
end
if seen[1] and seen[1] ~= ARGV[2] and counter_of(seen[1]) >= counter_of(ARGV[2]) then
  return {'fenced', counter_of(seen[1]), holder, calls, first}
end
redis.call('HDEL', KEYS[1], ARGV[1]) -- also if Redis is full: see rule 3
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if first > (tonumber(ARGV[3]) or first) then
  first = tonumber(ARGV[3])
  redis.call('HSET', KEYS[1], 'first:' .. ARGV[1], ARGV[3])
end
return {'applied', counter_of(ARGV[2]), holder, calls, first}
