-- drop_placements(placements, placement*; before) -> {verdict, dropped}
--
-- Drop placements of a group that has too many, unless they were renewed meanwhile.
--
-- KEYS  placements  zset  blocks of the group that have placements, by the Redis ms at which the last one ends
--       placement*  hash  one for each block
-- ARGV  before  blocks whose last placement ends after this Redis ms are kept
--
-- {'applied', dropped}  the placements of `dropped` blocks were dropped

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
