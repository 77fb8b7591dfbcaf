{{- /*
Values that an upgrade can't change: node plugins with two driver names, or two directories, know nothing of one another. Both
would offer the same GPUs, and the new one those that the old one has prepared for pods. Nothing is found where helm only renders.
*/ -}}
{{- define "tessera.lasting" -}}
{{- $values := dict "driverName" (list "--driver-name=" .Values.driverName) "nodePlugin.stateDir" (list "--state-dir=" (.Values.nodePlugin.stateDir | default "")) -}}
{{- with lookup "apps/v1" "DaemonSet" .Release.Namespace "tessera-node" -}}
  {{- $args := (index .spec.template.spec.containers 0).args -}}
  {{- range $value, $flag := $values -}}
    {{- $installed := "" -}}
    {{- $wanted := last $flag -}}
    {{- range $args -}}
      {{- if hasPrefix (first $flag) . -}}{{- $installed = trimPrefix (first $flag) . -}}{{- end -}}
    {{- end -}}
    {{- range $.Values.nodePlugin.extraArgs -}}
      {{- if hasPrefix (first $flag) . -}}{{- $wanted = trimPrefix (first $flag) . -}}{{- end -}}
    {{- end -}}
    {{- if ne $installed $wanted -}}
      {{- fail (printf "%s: %s is installed, and %s can't take over from it: the GPUs that pods have would be offered again; accepted: %s, or another one after helm uninstall" $value (quote $installed) (quote $wanted) (quote $installed)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
