-- drop_placements(placements, placement*; before) -> {verdict, dropped}
--
-- Drop notes of `place` from a group that has too many, unless they were renewed meanwhile.
--
-- KEYS  placements  zset  blocks of the group with a note, by the Redis ms of their end
--       placement*  hash  one for each block
-- ARGV  before  the Redis ms up to which a note may end
--
-- {'applied', dropped}  so many blocks have no note any more

local dropped = 0
for i = 2, #KEYS do
  local name = KEYS[i]:sub(-16)
  local ends = redis.call('ZSCORE', KEYS[1], name)
  if ends and tonumber(ends) <= tonumber(ARGV[1]) then
    redis.call('ZREM', KEYS[1], name)
    redis.call('DEL', KEYS[i])
    dropped = dropped + 1
  end
end
return {'applied', dropped}
