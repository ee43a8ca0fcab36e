-- keep_catalog(catalog; worker, before, value, workers_max) -> {verdict}
--
-- Change the description of a worker, a peer, or a group about which clients ask, if no other client has changed it.
--
-- KEYS  catalog      hash  workers as clients describe them, peers that clients have named, or the times at which groups were asked about
-- ARGV  worker       the worker's id, the peer's URL, or the id of the group
--       before       the description that the caller knows; empty for none
--       value        the new description, as JSON; empty removes it
--       workers_max  the most entries of the catalog
--
-- {'applied'}  written
-- {'other'}    the description is another one; nothing written
-- {'full'}     there are too many entries; nothing written

local held = redis.call('HGET', KEYS[1], ARGV[1])
if (held or '') ~= ARGV[2] then return {'other'} end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
elseif not held and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then
  return {'full'}
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return {'applied'}
