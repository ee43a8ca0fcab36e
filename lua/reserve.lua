-- reserve(load, changes, reservations, holders, request?, spec*, pulls*; again, milliseconds, nonce, context, weight_new, weight_active, limit, reservations_max, cold, repeatable, pulls_max, sources, candidate#, terms#) -> {verdict, which, tokens, requests, overdue, source}
--
-- Choose the best of some targets for a prompt, by their present loads, and add the reservation to the load of this
-- target. If the same call is repeated because its reply was lost, it finds the reservation by its nonce and adds
-- nothing.
--
-- KEYS  load              hash        the load of each target; `health:<publisher>`: whether it is left out of decisions.
--                                     Such a target is passed over, unless all candidates are left out
--       changes           zset        the targets whose loads have changed, each by the number of its last change
--       reservations      zset        decisions under way, by the Redis ms at which each is over
--       holders           hash        the group's holder table; a target that is not in it is passed over
--       request           string, PX  the reservation that this request got before, which counts until it ends; the key is
--                                     given only if `repeatable`
--       spec*             string, PX  speculative entries of the prompt at growing depths: the target that gets the prompt
--       pulls*            zset        copies under way from each possible source, by the Redis ms at which each is over
-- ARGV  again             '1' if the same call may have been made before: only then is its reservation looked for
--       milliseconds      how long the reservation lasts from now, unless it is released before
--       nonce             random, and the same in a repeated call. It distinguishes equal reservations
--       context           tokens of the prompt
--       weight_new, weight_active  cost = (tokens + weight_active * requests) / weight + weight_new * new + handicap. Of
--                         equal costs the first is the best
--       limit             a target with this many requests is passed over; 0 means no limit
--       reservations_max  if the group has this many reservations, no more are made
--       cold              '1' if no target has a block of the prompt
--       repeatable        '1': the same request gets the same reservation again
--       pulls_max         a source has at most so many copies under way
--       sources           the number of `pulls*`, and then a word for each candidate: `-`, or the indexes of its sources
--                         each followed by a comma, the best first. The first one with room is booked
--       candidate#        at most 8 publishers
--       terms#            the terms of the candidates, separated by blanks: from, new, handicap, weight, first,
--                         spec_milliseconds, promise. They are those of the `from`-th candidate, and of those behind it
--                         up to the next `from`. `new` is the prefill tokens, an integer. The speculative entries of a candidate are
--                         spec* without the first `first`, and last for `spec_milliseconds`; with 0 none is written.
--                         `promise` is a part of the reservation, for `release`; '-' if there is none
--
-- {'applied', which, tokens, requests, overdue, source}  the `which`-th candidate has the reservation; `tokens` and
--                                  `requests` are its load without the reservation, and `overdue` reservations were
--                                  ended. `source` is the index of the booked source, or 0
-- {'repeated', publisher, tokens, context, nonce, waited, promise, source}  the request has this reservation already; its
--                                  target had `waited` tokens to compute before it
-- {'full', 0, 0, 0, overdue}       the group has too many reservations; only overdue ones were ended
-- {'saturated', 0, 0, 0, overdue}  every candidate is at the limit, or gone; only overdue reservations were ended

local terms, count = {}, tonumber(ARGV[13])
local last = count
for i = #ARGV, 15 + count, -1 do
  local from, new, handicap, weight, others = ARGV[i]:match('^(%S+) (%S+) (%S+) (%S+) (.+)$')
  local of = {new = tonumber(new), handicap = tonumber(handicap), weight = tonumber(weight), others = others}
  for k = tonumber(from), last do terms[k] = of end
  last = from - 1
end

-- The reservation of the i-th candidate, and what its terms say of speculative entries.
local function reservation_of(i)
  local of = terms[i]
  local first, spec_milliseconds, promise = of.others:match('^(%S+) (%S+) (%S+)$')
  promise = promise == '-' and '' or ' ' .. promise
  return ARGV[13 + i] .. string.format(' %d ', of.new) .. ARGV[4] .. ' ' .. ARGV[3] .. promise, first, spec_milliseconds
end

local sources_count = tonumber(ARGV[12]:match('^%d+'))
local last_spec = #KEYS - sources_count

-- The index of the source that the reservation with this nonce has, or 0.
local function booked(nonce)
  for i = last_spec + 1, #KEYS do
    if redis.call('ZSCORE', KEYS[i], nonce) then return i - last_spec end
  end
  return 0
end

if ARGV[1] == '1' then
  local members = {}
  for i = 1, count do members[i] = reservation_of(i) end
  for i, due in ipairs(redis.call('ZMSCORE', KEYS[3], unpack(members))) do
    if due then
      local tokens, requests = (redis.call('HGET', KEYS[1], ARGV[13 + i]) or '0 0'):match('^(%d+) (%d+)')
      return {'applied', i, math.max(0, tokens - terms[i].new), math.max(0, requests - 1), 0, booked(ARGV[3])}
    end
  end
end

local first_spec = 5
if ARGV[10] == '1' then
  first_spec = 6
  local earlier = redis.call('GET', KEYS[5])
  if earlier then
    local member = earlier:match('^(.+) %d+$')
    local computed = member:gsub('^(%d+) %d+ ', '%1 0 ', 1) -- as `release` leaves it after its prefill
    local dues = redis.call('ZMSCORE', KEYS[3], member, computed, computed .. ' timed')
    if dues[1] or dues[2] or dues[3] then
      local publisher, tokens, context, nonce, promise, waited = earlier:match('^(%d+) (%d+) (%d+) (%x+) ?(%S*) (%d+)$')
      return {'repeated', tonumber(publisher), tonumber(tokens), tonumber(context), nonce, tonumber(waited), promise,
        booked(nonce)}
    end
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Notes that a load has changed, for `read_loads`. The very first number is the time, so that a new list of changes
-- does not repeat numbers of an earlier one.
local function note(name)
  local last = redis.call('ZRANGE', KEYS[2], '-1', '-1', 'WITHSCORES')[2]
  if not last then
    local begun = redis.call('TIME')
    last = begun[1] * 1000000 + begun[2]
  end
  redis.call('ZADD', KEYS[2], string.format('%d', last + 1), name)
end

-- Ends overdue reservations of all targets: a replica stopped or a client failed before it released them.
local overdue = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', string.format('%d', now), 'LIMIT', '0', '8')
for _, reservation in ipairs(overdue) do
  local publisher, tokens, context = reservation:match('^(%d+) (%d+) (%d+)')
  local value = redis.call('HGET', KEYS[1], publisher)
  if value then
    local had_tokens, had_requests, had_context, others = value:match('^(%d+) (%d+) (%d+) (.+)$')
    redis.call('HSET', KEYS[1], publisher, string.format('%d %d %d %s', math.max(0, had_tokens - tokens),
      math.max(0, had_requests - 1), math.max(0, had_context - context), others))
    note(publisher)
  end
  redis.call('ZREM', KEYS[3], reservation)
end
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[8]) then return {'full', 0, 0, 0, #overdue} end

local values = redis.call('HMGET', KEYS[1], unpack(ARGV, 14, 13 + count))
local limit, weight_new, weight_active = tonumber(ARGV[7]), tonumber(ARGV[5]), tonumber(ARGV[6])
local costs = {}
for i = 1, count do
  local tokens, requests, of = 0, 0, terms[i]
  if values[i] then tokens, requests = values[i]:match('^(%d+) (%d+)') end
  if limit == 0 or tonumber(requests) < limit then
    costs[i] = (tokens + weight_active * requests) / of.weight + weight_new * of.new + of.handicap
  end
end
-- Finds the best candidate that is still registered and not left out, which is mostly the first one; or the best one
-- that is left out.
local which, name, health, is_out, best_out, its_health
repeat
  which = nil
  for i = 1, count do
    if costs[i] and (not which or costs[i] < costs[which]) then which = i end
  end
  if not which then
    if not best_out then return {'saturated', 0, 0, 0, #overdue} end
    which, name, health, is_out = best_out, ARGV[13 + best_out], its_health, true
    break
  end
  costs[which] = nil
  name = ARGV[13 + which]
  local is_there = redis.call('HEXISTS', KEYS[4], 'publisher:' .. name) == 1
  if is_there then
    health, is_out = redis.call('HGET', KEYS[1], 'health:' .. name), false
    if health then
      local over, away = health:match('^%d+ %d+ (%d+) %d+ %S+ (%d+)$')
      is_out = math.max(over, away) > now
      if is_out and not best_out then best_out, its_health = which, health end
    end
  end
until is_there and not is_out

local of = terms[which]
local reservation, first, spec_milliseconds = reservation_of(which)
local waits, active, context, others = (values[which] or '0 0 0 0 0 0 0'):match('^(%d+) (%d+) (%d+) (.+)$')
if ARGV[9] == '1' then others = others:gsub('%d+$', string.format('%d', now)) end
redis.call('HSET', KEYS[1], name, string.format('%d %d %d %s', waits + of.new, active + 1, context + ARGV[4], others))
note(name)
redis.call('ZADD', KEYS[3], string.format('%d', now + ARGV[2]), reservation)
if health and not is_out then
  local first, second, over, pause, away = health:match('^(%d+) (%d+) (%d+) (%d+) %S+ (%d+)$')
  if over ~= '0' then -- its time is over: it gets no second request until this one has shown its state
    over = string.format('%d', now + pause)
    redis.call('HSET', KEYS[1], 'health:' .. name, table.concat({first, second, over, pause, ARGV[3], away}, ' '))
  end
end
if ARGV[10] == '1' then redis.call('SET', KEYS[5], reservation .. ' ' .. waits, 'PX', ARGV[2]) end
if spec_milliseconds ~= '0' then
  for i = first_spec + first, last_spec do redis.call('SET', KEYS[i], name, 'PX', spec_milliseconds) end
end
local source = 0
if sources_count > 0 then
  local choices = {}
  for word in ARGV[12]:gmatch('%S+') do choices[#choices + 1] = word end
  for index in choices[which + 1]:gmatch('%d+') do
    local pulls = KEYS[last_spec + index]
    redis.call('ZREMRANGEBYSCORE', pulls, '-inf', now)
    if redis.call('ZCARD', pulls) < tonumber(ARGV[11]) then
      local ends = string.format('%d', now + ARGV[2])
      redis.call('ZADD', pulls, ends, ARGV[3])
      if redis.call('PTTL', pulls) < tonumber(ARGV[2]) then redis.call('PEXPIREAT', pulls, ends) end
      source = tonumber(index)
      break
    end
  end
end
return {'applied', which, tonumber(waits), tonumber(active), #overdue, source}
