# A game for Godot 3 that speaks the protocol of Godot RL Agents, so that Sebulba trains it.
#
#     godot3-server --disable-render-loop --fixed-fps 60 -s game.gd --port=11008 --env_seed=1
#
# Two discs slide in a box each, and their agents push them towards the middle. The agent
# "vector" sees position and velocity, "pixels" two pictures of 8 x 8. The engine moves the discs.
extends SceneTree

const POLICIES = ["vector", "pixels"]
const PUSHES = [Vector2(0, 0), Vector2(-1, 0), Vector2(1, 0), Vector2(0, -1), Vector2(0, 1)]
const IMPULSE = 12.0
const HALF_WIDTH = 100.0
const RADIUS = 5.0
const STEPS = 60
const PIXELS = 8

var peer = StreamPeerTCP.new()
var bodies = []
var pictures = []  # of each agent: the one before, and the newest
var step = 0
var is_over = false
var answers_next = ""  # what the trainer waits for: "reset", "step" or nothing


func _initialize():
	var port = 11008
	for word in OS.get_cmdline_args():
		if word.begins_with("--port="):
			port = int(word.split("=")[1])
		if word.begins_with("--env_seed="):
			seed(int(word.split("=")[1]))
	for policy in POLICIES:
		bodies.append(new_disc())
		pictures.append([PoolByteArray(), PoolByteArray()])
	begin_episode()
	peer.connect_to_host("127.0.0.1", port)
	while peer.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		OS.delay_msec(1)
	peer.set_no_delay(true)
	peer.big_endian = false


# A disc in a space of its own, with four walls and no gravity.
func new_disc():
	var server = Physics2DServer
	var space = server.space_create()
	server.space_set_active(space, true)
	server.area_set_param(space, Physics2DServer.AREA_PARAM_GRAVITY, 0)
	var walls = server.body_create()
	server.body_set_mode(walls, Physics2DServer.BODY_MODE_STATIC)
	server.body_set_space(walls, space)
	for normal in [Vector2(1, 0), Vector2(-1, 0), Vector2(0, 1), Vector2(0, -1)]:
		var line = server.line_shape_create()
		server.shape_set_data(line, [normal, -HALF_WIDTH])
		server.body_add_shape(walls, line)
	var disc = server.body_create()
	server.body_set_mode(disc, Physics2DServer.BODY_MODE_RIGID)
	server.body_set_space(disc, space)
	server.body_set_state(disc, Physics2DServer.BODY_STATE_CAN_SLEEP, false)
	var circle = server.circle_shape_create()
	server.shape_set_data(circle, RADIUS)
	server.body_add_shape(disc, circle)
	return disc


func begin_episode():
	step = 0
	for k in range(bodies.size()):
		var reach = 0.8 * HALF_WIDTH
		var place = Vector2(rand_range(-reach, reach), rand_range(-reach, reach))
		var at = Transform2D(0, place)
		Physics2DServer.body_set_state(bodies[k], Physics2DServer.BODY_STATE_TRANSFORM, at)
		Physics2DServer.body_set_state(
			bodies[k], Physics2DServer.BODY_STATE_LINEAR_VELOCITY, Vector2(0, 0)
		)
		pictures[k] = [picture(place), picture(place)]


# Called before each step of the physics: it sees what the step before has done.
func _iteration(_delta):
	if is_over:
		return
	if answers_next == "reset":
		send({"type": "reset", "obs": observations()})
	if answers_next == "step":
		step += 1
		var over = step == STEPS
		send({
			"type": "step", "obs": observations(), "reward": rewards(), "done": [over, over]
		})
		if over:  # the places hold from the next step of the physics on
			begin_episode()
	answers_next = ""
	while answers_next == "":
		var message = receive()
		if message == null or message["type"] == "close":
			is_over = true
			quit()
			return
		handle(message)


func handle(message):
	if message["type"] == "env_info":
		send(env_info())
	elif message["type"] == "reset":
		begin_episode()
		answers_next = "reset"
	elif message["type"] == "action":
		for k in range(bodies.size()):
			var push = PUSHES[int(message["action"][k]["push"])]
			Physics2DServer.body_apply_central_impulse(bodies[k], IMPULSE * push)
		answers_next = "step"


func env_info():
	return {
		"type": "env_info",
		"n_agents": bodies.size(),
		"agent_policy_names": POLICIES,
		"action_space": [
			{"push": {"size": PUSHES.size(), "action_type": "discrete"}},
			{"push": {"size": PUSHES.size(), "action_type": "discrete"}},
		],
		"observation_space": [
			{"obs": {"size": [4], "space": "box"}},
			{"camera_2d": {"size": [PIXELS, PIXELS, 2], "space": "box"}},
		],
	}


func place_of(k):
	return Physics2DServer.body_get_state(bodies[k], Physics2DServer.BODY_STATE_TRANSFORM).origin


func observations():
	var place = place_of(0) / HALF_WIDTH
	var velocity = Physics2DServer.body_get_state(
		bodies[0], Physics2DServer.BODY_STATE_LINEAR_VELOCITY
	) / HALF_WIDTH
	pictures[1] = [pictures[1][1], picture(place_of(1))]
	var both = PoolByteArray()
	for i in range(PIXELS * PIXELS):  # channels last
		both.append(pictures[1][0][i])
		both.append(pictures[1][1][i])
	return [
		{"obs": [place.x, place.y, velocity.x, velocity.y]},
		{"camera_2d": both.hex_encode()},
	]


# The disc in grey: a pixel is brighter the nearer it is.
func picture(place):
	var grey = PoolByteArray()
	for row in range(PIXELS):
		for column in range(PIXELS):
			var centre = Vector2(column + 0.5, row + 0.5) * (2.0 * HALF_WIDTH / PIXELS)
			var distance = (centre - Vector2(HALF_WIDTH, HALF_WIDTH)).distance_to(place)
			grey.append(int(255 * clamp(1.0 - distance / 40.0, 0.0, 1.0)))
	return grey


func rewards():
	var each = []
	for k in range(bodies.size()):
		each.append(1.0 - min(1.0, place_of(k).length() / HALF_WIDTH))
	return each


# A message is its length, in 4 bytes from the lowest on, and JSON.
func send(message):
	var body = JSON.print(message).to_utf8()
	peer.put_u32(body.size())
	peer.put_data(body)


func receive():
	var size = read(4)
	if size == null:
		return null
	var length = size[0] + (size[1] << 8) + (size[2] << 16) + (size[3] << 24)
	var body = read(length)
	return null if body == null else JSON.parse(body.get_string_from_utf8()).result


# Waits for so many bytes; null if the trainer is gone.
func read(size):
	while peer.get_status() == StreamPeerTCP.STATUS_CONNECTED:
		if peer.get_available_bytes() >= size:
			return peer.get_data(size)[1]
		OS.delay_usec(20)
	return null
