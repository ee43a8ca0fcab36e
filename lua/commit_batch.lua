-- commit_batch(record, fence; publisher, token, calls, watermark, ts, newest_ts, digest, shards#2, event*) -> {verdict, watermark, calls}
--
-- Move the watermark of a stream, and the event_ids of its batches. Before, the caller has applied the blocks on several
-- shards, and every shard has acknowledged them.
--
-- KEYS  record     hash  the publisher's record; `late`: a call that was sent with fewer `calls` arrives late
--       fence      hash  the fence of shard 0; `calls:<publisher>`: how many calls of its stream were made here
-- ARGV  publisher  its integer id
--       token      the lease token the caller believes is the highest
--       calls      the number of calls that this shard has acknowledged; a shard that has fewer has lost writes
--       watermark  seq of the batch; '' if the stream has no watermark, so that only event_ids are written
--       ts, newest_ts, digest   the values of the batch, written with the watermark
--       shards     how many shards have got blocks since the last commit; then for each: its number, and how many
--                  calls it has acknowledged. This shows the next worker whether a shard has lost writes
--       event*     holder id, event_id
--
-- {'applied', watermark, calls}  the new watermark; 0 if none was given. `calls` counts this call
-- {'stale', watermark, calls}    the watermark is as high already; nothing written
-- {'fenced', 0}                  another worker has the stream, the publisher is gone, writes are lost, or this call is late,
--                                because the life of its batch has ended; nothing written

local state = redis.call('HMGET', KEYS[1], 'token', 'watermark', 'late')
if state[1] ~= ARGV[2] then return {'fenced', 0} end
local name = 'calls:' .. ARGV[1]
local calls = tonumber(redis.call('HGET', KEYS[2], name) or 0) or 0
local sent, late = tonumber(ARGV[3]), tonumber(state[3] or 0) or 0
if calls < sent or sent < late then return {'fenced', 0} end
local watermark = tonumber(state[2] or '')
local commit = tonumber(ARGV[4])
if watermark and commit and watermark >= commit then return {'stale', watermark, calls} end

redis.call('HSET', KEYS[2], name, string.format('%.0f', calls + 1))
local last_shard = 8 + 2 * tonumber(ARGV[8])
for i = 9, last_shard, 2 do redis.call('HSET', KEYS[1], 'shard:' .. ARGV[i], ARGV[i + 1]) end
for i = last_shard + 1, #ARGV, 2 do redis.call('HSET', KEYS[1], 'event:' .. ARGV[i], ARGV[i + 1]) end
if not commit then return {'applied', 0, calls + 1} end
redis.call('HSET', KEYS[1], 'watermark', ARGV[4], 'ts', ARGV[5], 'newest_ts', ARGV[6], 'digest', ARGV[7])
return {'applied', commit, calls + 1}
