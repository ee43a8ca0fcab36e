-- end_lost(holders, record, dead; holder) -> {verdict, ended}
--
-- Let a holder be swept that has blocks on another shard, and that this shard, shard 0, does not know. Shard 0 came
-- back empty or without its last writes, or has forgotten the holder after a sweep that the other shard has lost.
--
-- KEYS  holders  hash  the group's holder table
--       record   hash  the record of the holder's publisher, which may be gone
--       dead     set   holder ids whose blocks are still to be swept
-- ARGV  holder   its id
--
-- {'applied', ended}  it is to be swept; `ended` is 0 if that was known
-- {'stale', 0}        it is live, or a holder of a life that readers do not see yet; nothing written
--
-- Holders begin here before they get blocks anywhere, and their ids are never used again. So a holder that this shard
-- does not know now never becomes live.

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return {'stale', 0} end
local fields = redis.call('HGETALL', KEYS[2])
for i = 1, #fields, 2 do
  local beginning = fields[i]:sub(1, 7)
  if (beginning == 'holder:' or beginning == 'staged:') and fields[i + 1] == ARGV[1] then return {'stale', 0} end
end
return {'applied', redis.call('SADD', KEYS[3], ARGV[1])}
