-- add_counts(counts, seen; count#2, prefix*) -> {verdict, prefixes}
--
-- Add what a replica has counted since its last call to the counts of the fleet.
--
-- KEYS  counts  hash    numbers by name
--       seen    string  HyperLogLog of the prefix keys of decisions
-- ARGV  count    how many, then name and increase of each
--       prefix*  prefix keys, in hex
--
-- {'applied', prefixes}  added; `prefixes` is about how many different prefix keys there have been

local last = 1 + 2 * tonumber(ARGV[1])
for i = 2, last, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
for i = last + 1, #ARGV do redis.call('PFADD', KEYS[2], ARGV[i]) end
return {'applied', redis.call('PFCOUNT', KEYS[2])}
