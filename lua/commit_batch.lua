-- commit_batch(record; token, watermark, ts, newest_ts, digest, shards, event*) -> {verdict, watermark}
--
-- Move the watermark of a stream, and the event_ids of its batches. The caller applied the blocks on several shards
-- before, and every shard has acknowledged them.
--
-- KEYS  record     hash  the publisher's record
-- ARGV  token      the lease token the caller believes is the highest
--       watermark  seq of the batch; '' where the stream keeps none, and only event_ids move
--       ts, newest_ts, digest   kept beside it
--       shards     how many shards have got blocks since the last commit; then for each: its number, and the seq of
--                  the last batch that has blocks there. A takeover uses it to find a shard that has lost writes
--       event*     holder id, event_id
--
-- {'applied', watermark}  it is there now; 0 where none was given
-- {'stale', watermark}    it was there, or further, already; nothing written
-- {'fenced', 0}           somebody else has the stream, or it is gone; nothing written

local state = redis.call('HMGET', KEYS[1], 'token', 'watermark')
if state[1] ~= ARGV[1] then return {'fenced', 0} end
local watermark = tonumber(state[2] or '')
local commit = tonumber(ARGV[2])
if watermark and commit and watermark >= commit then return {'stale', watermark} end

local last_shard = 6 + 2 * tonumber(ARGV[6])
for i = 7, last_shard, 2 do redis.call('HSET', KEYS[1], 'shard:' .. ARGV[i], ARGV[i + 1]) end
for i = last_shard + 1, #ARGV, 2 do redis.call('HSET', KEYS[1], 'event:' .. ARGV[i], ARGV[i + 1]) end
if not commit then return {'applied', 0} end
redis.call('HSET', KEYS[1], 'watermark', ARGV[2], 'ts', ARGV[3], 'newest_ts', ARGV[4], 'digest', ARGV[5])
return {'applied', commit}
