-- take_lease(lease, record; own, random, worker, milliseconds, above, force) -> {verdict, counter}
--
-- Take the lease of a publisher's stream. The caller may apply the stream once it has raised the fence on every shard.
-- A call that is sent again, because its reply was lost, finds the token of its first copy, and takes no other one.
--
-- KEYS  lease         string, PX  the token of the worker that has the lease
--       record        hash        the publisher's record; `token` is the highest token so far, `worker` is its owner
-- ARGV  own           the caller's present token, if it needs a larger one; else ''
--       random        the random part of the new token, `<counter>.<random>`
--       worker        the worker that asks
--       milliseconds  how long the lease lasts
--       above         the new counter is larger than this
--       force         '1' takes it from the worker that has it (for an unregister or a move)
--
-- {'applied', counter}  the token is `<counter>.<random>`
-- {'held', 0}           another worker has it; nothing written
-- {'gone', 0}           the publisher does not exist; nothing written

local state = redis.call('HMGET', KEYS[2], 'life', 'token')
if not state[1] then return {'gone', 0} end
local holding = redis.call('GET', KEYS[1])
local taken = holding and holding:match('^(%d+)%.' .. ARGV[2] .. '$')
if taken then return {'applied', tonumber(taken)} end
if holding and holding ~= ARGV[1] and ARGV[6] ~= '1' then return {'held', 0} end

local digits = state[2] and state[2]:match('^(%d+)%.') or '0'
local last = #digits < 16 and tonumber(digits) or 0 -- if the token cannot be read, raising the fences finds a larger one
local counter = math.max(last, tonumber(ARGV[5])) + 1
local token = string.format('%.0f.%s', counter, ARGV[2])
redis.call('HDEL', KEYS[2], 'late') -- a late call has an older token from now on
redis.call('SET', KEYS[1], token, 'PX', ARGV[4])
redis.call('HSET', KEYS[2], 'token', token, 'worker', ARGV[3])
return {'applied', counter}
