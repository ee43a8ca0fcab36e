-- note_entries(entries, record; publisher, token, max, milliseconds, cut, value) -> {verdict, total, publishers, cut, chooses}
--
-- Write how many blocks the holders of a publisher have. Return how many the group has, and which of its holders end.
--
-- KEYS  entries       hash  `<publisher>`: its blocks, then `<holder>:<blocks>` for each of its holders; `total`: the
--                           blocks of all publishers; `cut`: holders of the group up to this id end; `turn`: the Redis
--                           ms until which one worker may choose a higher cut
--       record        hash  the publisher's record
-- ARGV  publisher     its integer id
--       token         the lease token the caller believes is the highest
--       max           the most blocks that the group may have
--       milliseconds  how long one worker chooses
--       cut           the cut that the caller has chosen; '' for none. The cut of the group never becomes lower
--       value         the publisher's field
--
-- {'applied', total, publishers, cut, chooses}  written; `publishers` have blocks. `chooses` is 1 if there are too many blocks
--                                            and the caller is the worker that may choose a cut
-- {'fenced', 0, 0, 0, 0}                     another worker has the stream, or the publisher is gone; nothing written

local entries, publisher = KEYS[1], ARGV[1]
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return {'fenced', 0, 0, 0, 0} end

-- The number with which a value of this script begins; 0 for any other text.
local function integer(text)
  local digits = (text or ''):match('^%d+') or '0'
  return #digits < 17 and tonumber(digits) or 0
end

local before = redis.call('HMGET', entries, publisher, 'total', 'cut', 'turn')
local total = math.max(0, integer(before[2] or nil) - integer(before[1] or nil) + integer(ARGV[6]))
local cut = integer(before[3] or nil)
if ARGV[5] ~= '' and tonumber(ARGV[5]) > cut then cut = tonumber(ARGV[5]) end

local time = redis.call('TIME')
local now, chooses = time[1] * 1000 + math.floor(time[2] / 1000), 0
local chosen = integer(before[4] or nil)
if total > tonumber(ARGV[3]) and ARGV[5] == '' and (now >= chosen or chosen > now + tonumber(ARGV[4])) then
  chooses = 1
  redis.call('HSET', entries, 'turn', string.format('%.0f', now + ARGV[4]))
end
redis.call('HSET', entries, publisher, ARGV[6], 'total', string.format('%.0f', total), 'cut', string.format('%.0f', cut))
local marks = chosen > 0 and 3 or chooses + 2
return {'applied', total, redis.call('HLEN', entries) - marks, cut, chooses}
